"""Starts that cannot work, told before MPI would die of them, and the words of the doctor."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from job import SMALL
from launch import is_open_mpi

MNTRAIN = [sys.executable, "-m", "mntrain"]
OWN_LOOP = "import mntrain\nwith mntrain.init():\n    pass\n"

# What the mpirun of the other MPI library passes to each rank.
PRTE = {
    "PMIX_NAMESPACE": "prterun-n1-7@1",
    "PMIX_RANK": "0",
    "PMIX_SERVER_URI41": "prterun-n1-7@0.0;tcp4://127.0.0.1:9",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
}
HYDRA = {"PMI_FD": "9", "PMI_RANK": "0", "PMI_SIZE": "2"}
STRANGE = HYDRA if is_open_mpi() else PRTE


pytestmark = pytest.mark.usefixtures("no_launcher")


def alone(command, **environment):
    return subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ([*MNTRAIN, *SMALL], 2),
        ([sys.executable, "-c", OWN_LOOP], 1),
    ],
)
def test_the_mpirun_of_another_mpi_is_one_sentence_with_the_fix(command, code):
    ended = alone(command, **STRANGE)
    assert ended.returncode == code
    (line,) = ended.stderr.splitlines()
    assert line.startswith(("mntrain: this mpirun", "mntrain: error: this mpirun"))
    assert line.endswith(f"Fix: start the job with {os.path.dirname(sys.executable)}/mpirun")


def test_the_doctor_shows_why_mpi_cannot_start():
    ended = alone([*MNTRAIN, "doctor", "--json"], **STRANGE)
    assert ended.returncode == 1
    report = json.loads(ended.stdout)
    assert report["status"] == "fail"
    assert report["checks"][0]["name"] == "start"
    assert "this mpirun passes the ranks by PMI" in report["checks"][0]["text"]


@pytest.mark.skipif(is_open_mpi(), reason="Open MPI does without /dev/shm")
@pytest.mark.cluster
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("option", "words"),
    [
        pytest.param("ro", "/dev/shm is read-only", marks=pytest.mark.exhaustive),
        ("size=3m", "/dev/shm has 3.1 MB free, and MPI needs 4.4 MB"),
    ],
)
def test_shared_memory_that_mpi_would_die_of_is_reported_first(option, words, tmp_path):
    script = f'mount -t tmpfs -o {option} tmpfs /dev/shm && exec "$@"'
    binary = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    command = ["unshare", "-m", "sh", "-c", script, "sh", binary, "-n", "4", *MNTRAIN]
    ended = alone([*command, *SMALL, "--run.dir", str(tmp_path / "run")])
    assert ended.returncode != 0
    ours = [line for line in ended.stderr.splitlines() if line.startswith("mntrain: ")]
    assert len(ours) == 1
    assert words in ours[0]
    assert "Fatal error in" not in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_the_doctor_runs_without_a_launcher(tmp_path):
    ended = alone([*MNTRAIN, "doctor", "--json", "--run.dir", str(tmp_path)])
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["ranks"], report["links"]) == (1, {"between_nodes": []})
