"""Jobs with checkpoints in the nodes' memory that lose a rank, and with it its node."""

import re
import shutil

import pytest
from job import completed, losses, metrics, summary, train

TASK = '''
import os, signal
from mntrain.tasks.lm import LanguageModel

class Dies(LanguageModel):
    """Kills rank 1 in its tenth forward, unless that is mended."""
    calls = 0
    def loss(self, model, batch):
        self.calls += 1
        rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
        if rank == "1" and self.calls == 10 and not os.environ.get("MENDED"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
'''


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_job_that_lost_a_node_goes_on_from_what_the_other_one_has_in_memory(tmp_path):
    (tmp_path / "dies.py").write_text(TASK)
    local = tmp_path / "local"
    options = ["--task", "dies:Dies", "--train.steps", "14", "--comm.ranks-per-node", "2"]
    options += ["--zero.stage", "1", "--checkpoint.local", str(local)]
    options += ["--checkpoint.local-every", "1"]
    killed = train(4, tmp_path, *options)
    assert killed.returncode != 0
    (run,) = local.iterdir()
    assert [path.name for path in sorted(run.iterdir())] == ["node-0", "node-1"]
    reached = len(metrics(tmp_path))
    shutil.rmtree(run / "node-0")
    again = completed(train(4, tmp_path, *options, env={"MENDED": "1"}))
    said = (
        r"restored step (\d+) in the nodes' memory, of 4 ranks .*; (\d+) steps? to be taken again"
    )
    ((step, lost),) = re.findall(said, again.stdout)
    assert int(step) > 0
    assert int(step) + int(lost) == reached
    assert not list(local.iterdir())
    assert summary(tmp_path)["checkpoints"]["local"]["failed"] == 0
    whole = tmp_path / "whole"
    whole.mkdir()
    shutil.copy(tmp_path / "dies.py", whole)
    completed(train(4, whole, *options[:6], "--zero.stage", "1", env={"MENDED": "1"}))
    assert losses(tmp_path) == losses(whole)
