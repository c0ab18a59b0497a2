"""`mntrain launch` on emulated nodes: a node is lost, and the run ends as an undisturbed one."""

import contextlib
import subprocess
import sys

import pytest
from job import job_words, losses, losses_alone, metrics, summary
from launch import in_own_group
from nodes import Cluster
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.thorough, pytest.mark.timeout(600)]

OPTIONS = ["--checkpoint.every", "2", "--train.steps", "40", "--run.grace", "5"]
# Ranks would wait for the timeout longer than a test, but a stopped node is found before.
LIMITS = ["--comm.timeout", "1000", "--comm.lost-after", "8"]


def command_of(cluster, folder):
    """Return the command of a job on two ranks, one on each of the first two nodes."""
    words, environment = cluster.mpirun(job_words(folder, *OPTIONS, *LIMITS))
    words[words.index("-n") + 1] = "2"
    return words, {**environment, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("loss", "spare", "options"),
    [
        # Under Slurm, tests/cluster/test_slurm.py shows the same.
        pytest.param("crash", 1, [], marks=pytest.mark.exhaustive),
        pytest.param("stop", 0, ["--nodes", "1:2"], marks=pytest.mark.exhaustive),
        pytest.param("cut", 1, ["--spares", "1"], marks=pytest.mark.exhaustive),
        pytest.param("crash", 0, ["--nodes", "1:2"], marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_loses_a_node_ends_with_the_losses_of_an_undisturbed_one(
    tmp_path, loss, spare, options
):
    with Cluster((1,) * (2 + spare), link=None) as cluster:
        command, environment = command_of(cluster, tmp_path)
        words = [sys.executable, "-m", "mntrain", "launch", *options, "--", *command]
        pipes = {"env": environment, "stderr": subprocess.STDOUT}
        with in_own_group(words, tmp_path, **pipes) as launch:
            with contextlib.suppress(FileNotFoundError):
                until(lambda: stepped(tmp_path, 6), launch)
            {"crash": cluster.crash, "stop": cluster.stop}.get(
                loss, lambda host: cluster.link(host, up=False)
            )("n2")
            out, _ = launch.communicate(timeout=300)
        assert launch.returncode == 0, out
    (start,) = [line for line in out.splitlines() if line.startswith("mntrain: launch: start 2 on")]
    end = summary(tmp_path)
    assert (end["status"], end["steps"]) == ("completed", 40), out
    hosts = [rank["host"] for rank in end["ranks"]]
    if spare or loss == "stop":  # a stopped node answers, and is taken last
        assert hosts == ["n1", "n3" if spare else "n2"], out
    else:
        assert hosts == ["n1"], out
    # Sums in another order: fp32 rounding, grown over the steps.
    assert losses(tmp_path) == pytest.approx(losses_alone(*OPTIONS), rel=2e-4)
    assert end["resumed_from"] is not None
    assert ("no answer from" in start) == (loss != "stop"), out
    assert ("while ranks waited for it, " in start) == (loss == "stop"), out


def stepped(folder, step):
    """Return whether a run has come to a step."""
    path = folder / "run" / "metrics.jsonl"
    return path.exists() and any(line["step"] >= step for line in metrics(folder))
