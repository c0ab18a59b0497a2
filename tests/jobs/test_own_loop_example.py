"""The examples of own loops, as a user runs them: to the end, and stopped and resumed."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from job import ckpt, completed, metrics, summary
from launch import in_own_group, mpirun
from safetensors.torch import load_file
from waiting import until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def column(folder: Path, name: str) -> list[float]:
    return [line[name] for line in metrics(folder)]


def said_by(*words: object) -> str:
    code, said, errors = ckpt(*words)
    assert (code, errors) == (0, "")
    return said


@pytest.mark.exhaustive
def test_a_loop_of_ones_own():
    result = completed(mpirun(2, [sys.executable, EXAMPLES / "own_loop.py"], timeout=250))
    values = [float(line.split()[3]) for line in result.stdout.splitlines() if "loss" in line]
    assert len(values) == 20
    assert values[-1] < 0.1 * values[0]


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_example_is_stopped_by_a_signal_and_continues_on_other_ranks(tmp_path):
    run = tmp_path / "run"
    words = [sys.executable, EXAMPLES / "own_loop_resume.py", run, "--steps", "24", "--stage"]
    with in_own_group([*words, "1"], tmp_path, ranks=2) as job:
        until(lambda: (run / "metrics.jsonl").exists() and len(metrics(tmp_path)) >= 5, job)
        master = re.search(r"process (\d+)", (run / ".lock").read_text())
        os.kill(int(master[1]), signal.SIGTERM)
        output = job.communicate(timeout=250)
    assert job.returncode == 75, output
    found = summary(tmp_path)
    assert (found["status"], found["reason"]) == ("preempted", "SIGTERM on rank 0")
    assert found["checkpoint"].endswith(f"step-{found['steps']:08d}")
    assert 5 <= found["steps"] < 24
    assert " by 2 ranks on 1 node;" in said_by("show", run)
    resumed = mpirun(1, [*words, "2"], timeout=250)
    assert (resumed.returncode, resumed.stdout, resumed.stderr) == (0, "", "")
    assert column(tmp_path, "step") == list(range(1, 25))
    assert column(tmp_path, "loss")[-1] < 0.9 * column(tmp_path, "loss")[0]
    assert summary(tmp_path)["status"] == "completed"
    check_commands(run, tmp_path / "model.safetensors")


def check_commands(run: Path, exported: Path) -> None:
    """The commands for checkpoints work on those of an own loop."""
    assert "step-00000024" in said_by("list", run)
    assert "states of scheduler" in said_by("show", run)
    assert ": sound, " in said_by("verify", run)
    said_by("export", run, exported)
    assert sorted(load_file(exported)) == ["0.bias", "0.weight", "2.bias", "2.weight"]
