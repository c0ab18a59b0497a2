"""Intervals between saves."""

import time

import pytest

from mntrain.config import CheckpointConfig
from mntrain.run.saving import SaveInterval


@pytest.fixture
def clock(monkeypatch):
    """A monotonic clock that the test sets, by changing clock[0]."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("every", "steps"), [("3", [3, 6, 9]), ("0", [])])
def test_an_interval_in_steps(every, steps):
    interval = SaveInterval(every, mtbf_hours=24)
    assert interval.wanted == bool(steps)
    assert [step for step in range(1, 10) if interval.due_after(step)] == steps
    assert not interval.due_now()


def test_an_interval_in_minutes(clock):
    interval = SaveInterval("1.5min", mtbf_hours=24)
    assert interval.wanted
    assert not interval.due_after(1)
    clock[0] += 89
    assert not interval.due_now()
    clock[0] += 2
    assert interval.due_now()
    interval.saved(cost_s=0.1)
    assert not interval.due_now()
    clock[0] += 91
    assert interval.due_now()


def test_auto_saves_at_once_and_then_as_often_as_its_cost_allows(clock):
    interval = SaveInterval("auto", mtbf_hours=24)
    assert interval.wanted
    assert interval.due_now()
    interval.saved(cost_s=0.5)
    clock[0] += 293  # sqrt(2 * 0.5 s * 24 h) is 293.9 s
    assert not interval.due_now()
    clock[0] += 2
    assert interval.due_now()


@pytest.mark.parametrize(
    "every", ["-1", "1.5", "10 min", "0min", "0.0min", "min", "often", "1h", ""]
)
def test_invalid_values_of_checkpoint_every(every):
    with pytest.raises(ValueError, match=r"\nevery\n") as error:
        CheckpointConfig(every=every)
    assert "must be a number of steps, minutes such as 10min, or auto" in str(error.value)
    for valid in ("0", "500", "10min", "0.5min", "auto"):
        assert CheckpointConfig(every=valid).every == valid


@pytest.mark.parametrize("every", ["500", "30min", "auto"])
def test_a_save_that_failed_is_tried_again_in_a_minute(clock, every):
    interval = SaveInterval(every)
    interval.saved(cost_s=10.0)
    interval.failed()
    clock[0] += 59
    assert not interval.due_now()
    clock[0] += 2
    assert interval.due_now()
    assert interval.by_clock
    interval.saved(cost_s=10.0)
    assert not interval.due_now()
    assert interval.by_clock == (every != "500")
