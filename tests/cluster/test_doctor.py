"""The doctor on emulated nodes: a slow link is named, and a folder that hosts do not share."""

import json
import os
import subprocess
import sys

import pytest
from launch import is_open_mpi

import slurm

pytestmark = pytest.mark.cluster

SECONDS = 100
DOCTOR = [sys.executable, "-m", "mntrain", "doctor", "--json"]


def doctor(cluster, *words):
    command, environment = cluster.mpirun([*DOCTOR, *words])
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.stdout.startswith("{"), ended.stderr
    report = json.loads(ended.stdout)
    return ended.returncode, report, {check["name"]: check for check in report["checks"]}


@pytest.mark.thorough
def test_the_node_with_a_slow_link_is_named(make_cluster, tmp_path):
    with make_cluster(ranks=(2, 1, 1), link="1gbit") as cluster:
        shape = ["root", "tbf", "rate", "20mbit", "burst", "128kb", "latency", "50ms"]
        slow = ["tc", "qdisc", "replace", "dev", "eth0", *shape]
        subprocess.run([*cluster.enter("n2"), *slow], check=True)
        code, report, checks = doctor(cluster, "--run.dir", str(tmp_path))
    assert code == 0
    assert report["hosts"] == ["n1", "n2", "n3"]
    assert report["slowest_node"] == "n2"
    between = checks["links between nodes"]
    assert between["status"] == "warn"
    assert "the slowest node is n2" in between["text"]
    assert [link["hosts"] for link in report["links"]["between_nodes"]] == [
        ["n1", "n2"],
        ["n1", "n3"],
        ["n2", "n3"],
    ]
    # An echo takes each way once: one at 20 Mbit/s, one at 1 Gbit/s.
    speeds = [link["mb_per_s"] for link in report["links"]["between_nodes"]]
    assert speeds[0] < 8
    assert speeds[2] < 8
    assert speeds[1] > 20
    assert checks["clocks"]["status"] == "pass"
    assert checks["shared files"]["status"] == "pass"


@pytest.mark.thorough
def test_a_folder_that_the_hosts_do_not_share_fails(make_cluster):
    # Each emulated node has its own /dev/shm.
    with make_cluster(ranks=(1, 1), link=None) as cluster:
        code, _, checks = doctor(cluster, "--run.dir", "/dev/shm")
        left = subprocess.check_output([*cluster.enter("n1"), "ls", "-a", "/dev/shm"], text=True)
    assert code == 1
    assert checks["shared files"]["status"] == "fail"
    assert checks["shared files"]["text"].startswith("n2 does not see the files that rank 0 writes")
    assert "mntrain-doctor" not in left


@pytest.mark.thorough
@pytest.mark.skipif(slurm.available() is not None, reason=str(slurm.available()))
def test_the_wrong_plugin_of_srun_is_one_sentence_before_mpi_dies(tmp_path):
    wrong, right = ("pmi2", "pmix") if is_open_mpi() else ("pmix", "pmi2")
    train = [sys.executable, "-m", "mntrain", "--run.dir", str(tmp_path / "run")]
    with slurm.SlurmCluster() as cluster:
        srun = ["srun", f"--mpi={wrong}", "--nodes=2", "--ntasks=2", *train]
        command = [*cluster.enter(slurm.HEAD), *srun]
        ended = subprocess.run(
            command,
            env={**os.environ, **cluster.environment},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert ended.returncode == 2, ended.stderr
    ours = [line for line in ended.stderr.splitlines() if not line.startswith("srun: ")]
    assert len(ours) == 1, ended.stderr
    assert ours[0].startswith(f"mntrain: srun --mpi={wrong} passes the ranks by PMI")
    assert ours[0].endswith(f"Fix: start the job with srun --mpi={right}")
    assert not (tmp_path / "run").exists()
