"""Deadlines of a job, and its signals."""

import os
import signal
import time
from contextlib import closing
from unittest.mock import MagicMock

from mntrain.run.signals import Deadline, StopRequests


def slurm(seconds: float) -> dict[str, str]:
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time() + seconds))}


def test_minutes_count_from_now_or_a_start_before(clock):
    assert not Deadline(None, {}).near(1e9, 1e9)
    assert Deadline(10, {}, start=clock[0] - 500).at == clock[0] + 100
    deadline = Deadline(10, {})
    assert deadline.reason == "its 10 minutes are over"
    clock[0] += 600 - 30 - 2 * (4 + 3) - 1  # 30 s are 5 % of it
    assert not deadline.near(step_s=4, save_s=3)
    clock[0] += 2
    assert deadline.near(step_s=4, save_s=3)


def test_the_end_of_the_allocation_counts_if_it_is_earlier(clock, monkeypatch):
    late, early = slurm(3600), slurm(60)
    assert Deadline(10, late).reason == "its 10 minutes are over"
    deadline = Deadline(10, early)
    assert deadline.reason.startswith("the allocation ends 20")
    monkeypatch.setattr(time, "time", lambda: 0.0)  # a clock that is set back changes nothing
    clock[0] += 60 - 5 - 4 - 2  # a second of which its own clock does not know
    assert not deadline.near(1, 1)
    clock[0] += 3
    assert deadline.near(1, 1)


def test_a_forked_child_ends_by_a_signal_as_without_handlers():
    ready, started = os.pipe()
    requests = StopRequests(MagicMock(), Deadline(None, {}), 30.0, MagicMock(), float)
    with closing(requests):
        if not (child := os.fork()):
            os.write(started, b"1")
            for _ in range(600):  # a signal just before a sleep is handled after it
                time.sleep(0.1)
            os._exit(3)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert requests._first is None
    os.close(ready)
    os.close(started)
