"""A link that is down for a while: what is said of the rank behind it, and when it is lost."""

import subprocess
import sys
import time

import pytest
from launch import in_own_group

pytestmark = pytest.mark.cluster

# Adds up all ranks again and again until the file is there.
LOOP = """
import pathlib, sys, time
import mntrain, torch

lost_after = float(sys.argv[2])
with mntrain.init(device="cpu", warn_after=4.0, lost_after=lost_after) as world:
    for step in range(100_000):
        if world.sum([float(pathlib.Path(sys.argv[1]).exists())])[0]:
            break
        if step == 5 and world.rank == 0:
            print("begun", flush=True)
        time.sleep(0.05)
    if world.rank == 0:
        print("ended well", flush=True)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("lost_after", "down_s"),
    [
        pytest.param(9.0, None, marks=pytest.mark.thorough),
        pytest.param(60.0, 25.0, marks=pytest.mark.exhaustive),
    ],
)
def test_a_link_that_is_down_is_named_and_its_node_lost_after_the_limit_only(
    make_cluster, tmp_path, lost_after, down_s
):
    stop = tmp_path / "stop"
    with make_cluster(ranks=(1, 1), link=None) as cluster:
        words = [sys.executable, "-c", LOOP, str(stop), str(lost_after)]
        command, environment = cluster.mpirun(words)
        with in_own_group(command, tmp_path, env=environment, stderr=subprocess.STDOUT) as job:
            said = read_until(job, "begun")
            cluster.link("n2", up=False)
            cut = time.monotonic()
            if down_s is None:
                said = read_until(job, "is lost")
                # Whatever ranks have sent meanwhile, such as questions after the warning.
                assert time.monotonic() < cut + lost_after + 2.5
                assert "does not answer: nor does its node" in said
                assert (
                    "error: rank 1 on n2 is lost: the node, or the network to it, does not" in said
                )
                return
            said = read_until(job, "rank 1 on n2: does not answer")
            time.sleep(down_s)
            cluster.link("n2", up=True)
            stop.touch()
            said += read_until(job, "ended well")
    assert "rank 1 on n2: does not answer: nor does its node: the link to it may be down" in said
    assert "is stopped" not in said


def read_until(job, text):
    """Return the output of a job up to a line that has a text."""
    lines = []
    for line in job.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    pytest.fail(f"it ended without {text!r}:\n{''.join(lines)}")
