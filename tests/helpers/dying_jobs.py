"""A job with checkpoints in the nodes' memory that loses a rank, and goes on without a node's."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

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


def assert_goes_on(
    folder: Path, local: Path, lose: Callable[[], object], *more: str, **how
) -> None:
    """Check the losses of a job of four ranks that was killed, and that of a lost node."""
    (folder / "dies.py").write_text(TASK)
    options = ["--task", "dies:Dies", "--train.steps", "14", "--zero.stage", "1", *more]
    saves = ["--checkpoint.local", str(local), "--checkpoint.local-every", "1"]
    killed = train(4, folder, *options, *saves, **how)
    assert killed.returncode != 0
    reached = len(metrics(folder))
    lose()
    again = completed(train(4, folder, *options, *saves, env={"MENDED": "1"}, **how))
    said = r"restored step (\d+) in the nodes' memory, of 4 ranks .*; (\d+) steps? of metrics.jsonl"
    ((step, lost),) = re.findall(said, again.stdout)
    assert int(step) > 0
    assert int(step) + int(lost) == reached
    assert summary(folder)["checkpoints"]["local"]["failed"] == 0
    whole = folder / "whole"
    whole.mkdir()
    shutil.copy(folder / "dies.py", whole)
    completed(train(4, whole, *options, env={"MENDED": "1"}, **how))
    assert losses(folder) == losses(whole)
