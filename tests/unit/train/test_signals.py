"""Deadlines of a job."""

import math
import time
from datetime import datetime, timedelta

import pytest

from mntrain.train.signals import Deadline


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that the test sets, by changing clock[0]."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def slurm(seconds: float) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time() + seconds))}


def test_there_is_no_deadline_outside_of_an_allocation():
    assert not Deadline(None, {}).near(1e9, 1e9)


def test_minutes_count_from_now(clock):
    deadline = Deadline(10, {})
    assert deadline.reason == "--run.max-minutes 10"
    clock[0] += 600 - 30 - 2 * (4 + 3) - 1  # 30 s are 5 % of it
    assert not deadline.near(step_s=4, save_s=3)
    clock[0] += 2
    assert deadline.near(step_s=4, save_s=3)


def test_the_end_of_the_allocation_counts_if_it_is_earlier(clock):
    late, early = slurm(3600), slurm(60)
    assert Deadline(10, late).reason == "--run.max-minutes 10"
    deadline = Deadline(10, early)
    assert deadline.reason.startswith("the allocation ends 20")
    clock[0] += 60 - 5 - 4 - 2  # a second of which its own clock does not know
    assert not deadline.near(1, 1)
    clock[0] += 3
    assert deadline.near(1, 1)


def test_a_clock_that_is_set_back_changes_nothing(clock, monkeypatch):
    deadline = Deadline(None, slurm(60))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    clock[0] += 59
    assert deadline.near(1, 1)


def scontrol(folder, monkeypatch, script: str) -> dict[str, str]:
    """Return the environment of a Slurm job without an end time, and install a scontrol."""
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return {"SLURM_JOB_ID": "7"}


def test_scontrol_is_run_if_the_environment_has_no_end_time(tmp_path, monkeypatch):
    end = (datetime.now() + timedelta(seconds=100)).isoformat(timespec="seconds")
    line = f'echo "JobId=$4 JobName=a StartTime=2026-01-01T00:00:00 EndTime={end} Deadline=N/A"'
    deadline = Deadline(None, scontrol(tmp_path, monkeypatch, line))
    assert 98 < deadline.at - time.monotonic() < 101


@pytest.mark.parametrize(
    "script", ["exit 1", 'echo "JobId=7 EndTime=Unknown Deadline=N/A"', "echo"]
)
def test_without_an_answer_of_scontrol_there_is_no_deadline(tmp_path, monkeypatch, script):
    assert Deadline(None, scontrol(tmp_path, monkeypatch, script)).at == math.inf
