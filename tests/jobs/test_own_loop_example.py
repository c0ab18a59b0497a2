"""The example of an own loop, as a user runs it: stopped and resumed."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from job import ckpt, metrics, summary
from launch import Result, mpirun
from safetensors.torch import load_file

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_loop_resume.py"


def run(ranks: int, folder: Path, *options: object) -> Result:
    command = [sys.executable, EXAMPLE, folder / "run", *map(str, options)]
    return mpirun(ranks, command, timeout=250)


def column(folder: Path, name: str) -> list[float]:
    return [line[name] for line in metrics(folder)]


def said_by(*words: object) -> str:
    code, said, errors = ckpt(*words)
    assert (code, errors) == (0, "")
    return said


def signal_master(folder: Path, number: int) -> None:
    """Send a signal to the process that has locked the run, once it has taken five steps."""
    while not (folder / "run" / "metrics.jsonl").exists() or len(metrics(folder)) < 5:
        time.sleep(0.01)
    process = re.search(r"process (\d+)", (folder / "run" / ".lock").read_text())
    os.kill(int(process[1]), number)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_example_is_stopped_by_a_signal_and_continues_on_other_ranks(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steps = ["--steps", 24]
    assert run(1, whole, *steps, "--stage", 0).returncode == 0
    sender = threading.Thread(target=signal_master, args=(parts, signal.SIGTERM))
    sender.start()
    stopped = run(2, parts, *steps, "--stage", 1)
    sender.join()
    assert stopped.returncode == 75, stopped.report()
    found = summary(parts)
    assert (found["status"], found["reason"]) == ("preempted", "SIGTERM on rank 0")
    assert found["checkpoint"].endswith(f"step-{found['steps']:08d}")
    assert 5 <= found["steps"] < 24
    assert " by 2 ranks on 1 node;" in said_by("show", parts / "run")
    resumed = run(1, parts, *steps, "--stage", 2)
    assert (resumed.returncode, resumed.stdout, resumed.stderr) == (0, "", "")
    assert column(parts, "step") == list(range(1, 25))
    assert column(parts, "lr") == pytest.approx(column(whole, "lr"), rel=1e-12)
    # Sums in another order: fp32 rounding, grown over the steps.
    assert column(parts, "loss") == pytest.approx(column(whole, "loss"), rel=1e-3)
    assert column(parts, "loss")[-1] < 0.9 * column(parts, "loss")[0]
    assert summary(parts)["status"] == "completed"
    check_commands(tmp_path, whole, parts)


def check_commands(tmp_path: Path, whole: Path, parts: Path) -> None:
    """The commands for checkpoints work on those of an own loop."""
    assert "step-00000024" in said_by("list", parts / "run")
    assert "states of scheduler" in said_by("show", parts / "run")
    assert ": sound, " in said_by("verify", parts / "run")
    for folder in (whole, parts):
        said_by("export", folder / "run", tmp_path / f"{folder.name}.safetensors")
    ours, theirs = (load_file(tmp_path / f"{name}.safetensors") for name in ("parts", "whole"))
    assert sorted(ours) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape
        assert ours[name].sub(tensor).abs().max() < 1e-2 * tensor.abs().max()
