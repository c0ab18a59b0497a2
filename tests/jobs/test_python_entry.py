"""`mntrain.train.run`, as docs/job.md shows it, and what it leaves in a process."""

import os
import re
import sys
from pathlib import Path

import pytest
from launch import mpirun

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs" / "job.md").read_text().partition("## From Python")[2]
EXAMPLE = re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)[0]

BEFORE = """
import gc, json, signal, sys, threading
from pathlib import Path
hook, handlers = sys.excepthook, [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
threads = threading.enumerate()
"""
AFTER = """
from mntrain import AgreedError
from mntrain.options.config import Config, RunConfig, TrainConfig
from mntrain.errors import TrainingStoppedError
from mpi4py import MPI

def closed():
    now = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert now == handlers
    others = [t.name for t in threading.enumerate() if t not in threads]
    assert others == ["mntrain watchdog"], others  # which waits for the other ranks at the end
    assert gc.get_freeze_count() == 0, gc.get_freeze_count()

class LossOfNaN(Digits):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return type(loss)(loss.mean * float("nan"), loss.count)

assert json.loads(Path("runs/a/summary.json").read_text()) == summary
assert summary["steps"] == 2 * 54  # of 1708 samples, 32 a step
closed()
assert sys.excepthook is hook
config = Config(train=TrainConfig(steps=3), run=RunConfig(dir="runs/b"))
task = Digits(Config())
first = mntrain.train.run(task, config)
assert (first["status"], task.config.train.steps) == ("completed", 3)
config = Config(train=config.train, run=RunConfig(dir="runs/c"))
again = mntrain.train.run("examples.digits:Digits", config)
assert again["final_loss"] == first["final_loss"]
try:
    mntrain.train.run(LossOfNaN, {"train": {"steps": 3}, "run": {"dir": "runs/d"}})
except TrainingStoppedError as error:
    assert "in step 1, the loss is nan on rank 0" in str(error), error
else:
    raise AssertionError
closed()
rank = MPI.COMM_WORLD.rank
for task, options, said in (
    (Digits, {"train.stepz": 3} if rank else {}, "rank 1: options: train.stepz: no such option"),
    (Digits, {"train.steps": 3, "train": {"steps": 4}}, "train.steps and train.steps are one opt"),
    (Digits, {"optim.lr": 0.1 * (1 + rank)}, "--optim.lr"),
    (int, {}, "int does not derive from mntrain.tasks.Task"),
    (7, {}, "the task is of type"),
):
    try:
        mntrain.train.run(task, options)
    except AgreedError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
closed()
"""


@pytest.mark.exhaustive
def test_the_example_runs_and_leaves_nothing_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BEFORE + EXAMPLE + AFTER)
    result = mpirun(
        2,
        [sys.executable, "-W", "error", script],
        timeout=250,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.report()
    assert "completed {'accuracy': 0.9" in result.stdout
