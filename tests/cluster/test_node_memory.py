"""A job with checkpoints in the memory of emulated nodes, each with a /dev/shm of its own."""

import re
import subprocess
from pathlib import Path

import pytest
from job import LATE, completed, losses, losses_alone, metrics, summary, train

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]

TASK = f"""{LATE}
class Dies(Late):
    at = 10  # of two in each step
    def broken(self, model, batch):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(600)
def test_a_job_goes_on_from_copies_after_a_node_was_started_anew(make_cluster, tmp_path):
    (tmp_path / "dies.py").write_text(TASK)
    local = Path("/dev/shm/mntrain-test")
    options = ["--task", "dies:Dies", "--train.steps", "8", "--zero.stage", "1"]
    saves = ["--checkpoint.local", str(local), "--checkpoint.local-every", "1"]
    with make_cluster(ranks=(1, 1), link=None) as cluster:

        def on(host: str, *command: object) -> str:
            words = [*cluster.enter(host), *map(str, command)]
            return subprocess.run(words, check=True, capture_output=True, text=True).stdout

        first, second = cluster.hosts
        mended = {"env": {"FIXED": "1"}, "cluster": cluster}
        assert train(2, tmp_path, *options, *saves, cluster=cluster).returncode != 0
        reached = len(metrics(tmp_path))
        on(first, "rm", "-r", local)
        again = completed(train(2, tmp_path, *options, *saves, **mended))
        said = r"restored step (\d+) in the nodes' memory, of 2 ranks .*; (\d+) steps? of metrics"
        ((step, lost),) = re.findall(said, again.stdout)
        assert int(step) > 0
        assert int(step) + int(lost) == reached
        assert summary(tmp_path)["checkpoints"]["local"]["failed"] == 0
        for host in (first, second):
            assert on(host, "find", local).split() == [str(local)]
    # Sums in another order: fp32 rounding, grown over the steps.
    alone = losses_alone("--train.steps", "8")
    assert losses(tmp_path) == pytest.approx(alone, rel=2e-4)
