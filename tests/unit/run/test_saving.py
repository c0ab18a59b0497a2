"""Intervals between saves."""

import pytest

from mntrain.options.config import CheckpointConfig
from mntrain.run.saving import SaveInterval


@pytest.mark.parametrize(("every", "steps"), [("3", [3, 6, 9]), ("0", [])])
def test_an_interval_in_steps(every, steps):
    interval = SaveInterval(every, mtbf_hours=24)
    assert interval.wanted == bool(steps)
    assert [step for step in range(1, 10) if interval.due_after(step)] == steps
    assert not interval.due_now()


@pytest.mark.parametrize(
    ("every", "first_s", "cost_s", "then_s"),
    [
        ("1.5min", 90.0, 0.1, 90.0),
        ("auto", 0.0, 0.5, 293.9),  # sqrt(2 * 0.5 s * 24 h)
    ],
)
def test_an_interval_by_the_clock(clock, every, first_s, cost_s, then_s):
    interval = SaveInterval(every, mtbf_hours=24)
    assert interval.wanted
    assert not interval.due_after(1)
    for seconds in (first_s, then_s):
        clock[0] += max(0.0, seconds - 1)
        assert interval.due_now() == (seconds == 0)
        clock[0] += 2
        assert interval.due_now()
        interval.saved(cost_s)


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
