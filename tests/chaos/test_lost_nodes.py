"""A node or a network that is lost ends the job within 30 s; one that comes back does not."""

import re
import sys
import threading
import time

import pytest
from launch import is_open_mpi, mpirun
from nodes import Cluster, available

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.xdist_group("cluster"),
    pytest.mark.skipif(available() is not None, reason=str(available())),
]

LOOP = """
import sys, time
from pathlib import Path
import torch, mntrain

class Noting:
    def write(self, text):
        if "error: " in text:
            Path(sys.argv[1] + ".reported").write_text(str(time.monotonic()))
        return sys.__stderr__.write(text)
    def flush(self):
        sys.__stderr__.flush()

sys.stderr = Noting()
with mntrain.init(tune=False) as world:
    start = time.monotonic()
    while True:
        world.collectives.all_reduce(torch.ones(100_000)).wait()
        if world.master:
            Path(sys.argv[1]).touch()
        end = torch.tensor([float(time.monotonic() > start + 15)])
        world.collectives.broadcast(end).wait()
        time.sleep(0.02)
        if end.item() and len(sys.argv) > 2:
            break
    print("completed", flush=True)
"""


def run(tmp_path, act, *options):
    """Run a loop on nodes of one and two ranks; `act` during it.

    Returns its result, the seconds from `act` until an error was reported, if any, and the hosts.
    """
    (tmp_path / "loop.py").write_text(LOOP)
    started, acted = tmp_path / "started", []

    def wait_and_act():
        while not started.exists():
            time.sleep(0.1)
        acted.append(time.monotonic())
        act(cluster)

    with Cluster(ranks=(1, 2), link=None) as cluster:
        thread = threading.Thread(target=wait_and_act, daemon=True)
        thread.start()
        command = [sys.executable, tmp_path / "loop.py", started, *options]
        result = mpirun(3, command, timeout=90, cluster=cluster)
        thread.join(30)
        reported = tmp_path / "started.reported"
        seconds = float(reported.read_text()) - acted[0] if reported.exists() else None
        return result, seconds, cluster.hosts


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("how", "lost"), [("crash", 1), ("cut", 0)])
def test_a_lost_node_is_named_within_30_s(tmp_path, how, lost):
    if is_open_mpi() and how == "crash":
        pytest.skip("Open MPI's mpirun ends the job itself when the agent of a node ends")

    def act(cluster):
        if how == "crash":
            cluster.crash(cluster.hosts[lost])
        else:
            cluster.link(cluster.hosts[lost], up=False)

    result, seconds, hosts = run(tmp_path, act)
    assert seconds < 30, result.report()  # mpirun itself may wait for the lost node for ever
    ranks = "rank 0" if lost == 0 else "ranks 1, 2"
    assert re.search(rf"error: {ranks} on {hosts[lost]} (is|are) lost", result.stderr), (
        result.report()
    )
    assert "completed" not in result.stdout


@pytest.mark.timeout(150)
def test_a_link_that_comes_back_ends_nothing(tmp_path):
    def act(cluster):
        cluster.link(cluster.hosts[1], up=False)
        time.sleep(3)
        cluster.link(cluster.hosts[1], up=True)

    result, reported, _ = run(tmp_path, act, "ends")
    assert (result.returncode, reported) == (0, None), result.report()
    assert result.stdout.count("completed") == 3
    assert "error" not in result.stderr
