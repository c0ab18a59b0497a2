"""Two jobs in one run directory."""

import json
import os
import signal
import subprocess
import sys

import pytest
from waiting import until

from mntrain.checkpoint.reader import list_checkpoints

LOOP = """
import sys, time
import mntrain, torch

with mntrain.init(device="cpu") as world:
    model = torch.nn.Linear(3, 2)
    optimizer = world.optimizer(model, torch.optim.SGD, lr=0.01)
    checkpoints = world.checkpoints(sys.argv[1], model=model, optimizer=optimizer, every=1, keep=2)
    done = checkpoints.restore()
    for step in range(done + 1, 10_000):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        checkpoints.save(step)
        time.sleep(0.05)
"""


def start(folder):
    return subprocess.Popen(
        [sys.executable, folder / "loop.py", folder / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.exhaustive  # tests/unit/run/test_lock.py shows most of it
@pytest.mark.timeout(600)
def test_two_jobs_never_train_in_one_directory(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    run = tmp_path / "run"
    first = start(tmp_path)
    try:
        until(lambda: list_checkpoints(run), first)
        second = start(tmp_path)
        errors = second.communicate(timeout=250)[1]
        assert second.returncode == 1, errors
        assert f"run is in use by a job (on {os.uname().nodename}, process {first.pid}," in errors
    finally:
        first.kill()
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    assert not [path for path in (run / "checkpoints").iterdir() if path.suffix == ".aside"]
    before = list_checkpoints(run)[0].name
    third = start(tmp_path)
    try:
        until(lambda: list_checkpoints(run)[0].name > before, third)
        holder = json.loads((run / ".lock").read_text())
        other = {**holder, "token": "another", "holder": "on far, process 7"}
        (run / ".lock").write_text(json.dumps(other))  # as one that had found no sign of it
        errors = third.communicate(timeout=250)[1]
    finally:
        third.kill()
    assert third.returncode != 0
    assert "waiting up to" not in errors  # for a process that is gone
    assert "run was taken by another job (on far, process 7), which had found no sign" in errors
    assert json.loads((run / ".lock").read_text()) == other
    assert not (run / "summary.json").exists()
