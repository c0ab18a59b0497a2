"""A job with checkpoints in the memory of emulated nodes, each with a /dev/shm of its own."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from job import LATE, completed, losses, metrics, summary, train

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]

TASK = f"""{LATE}
class Dies(Late):
    at = 10
    def broken(self, model, batch):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(600)
def test_a_job_goes_on_from_copies_after_a_node_was_started_anew(make_cluster, tmp_path):
    (tmp_path / "dies.py").write_text(TASK)
    local, whole = Path("/dev/shm/mntrain-test"), tmp_path / "whole"
    options = ["--task", "dies:Dies", "--train.steps", "14", "--zero.stage", "1"]
    saves = ["--checkpoint.local", str(local), "--checkpoint.local-every", "1"]
    with make_cluster(ranks=(2, 2), link=None) as cluster:

        def on(host: str, *command: object) -> str:
            words = [*cluster.enter(host), *map(str, command)]
            return subprocess.run(words, check=True, capture_output=True, text=True).stdout

        first, second = cluster.hosts
        mended = {"env": {"FIXED": "1"}, "cluster": cluster}
        assert train(4, tmp_path, *options, *saves, cluster=cluster).returncode != 0
        reached = len(metrics(tmp_path))
        on(first, "rm", "-r", local)
        again = completed(train(4, tmp_path, *options, *saves, **mended))
        said = r"restored step (\d+) in the nodes' memory, of 4 ranks .*; (\d+) steps? of metrics"
        ((step, lost),) = re.findall(said, again.stdout)
        assert int(step) > 0
        assert int(step) + int(lost) == reached
        assert summary(tmp_path)["checkpoints"]["local"]["failed"] == 0
        whole.mkdir()
        shutil.copy(tmp_path / "dies.py", whole)
        completed(train(4, whole, *options, **mended))
        assert losses(tmp_path) == losses(whole)
        for host in (first, second):
            assert on(host, "find", local).split() == [str(local)]
