"""How long a rank that waits sleeps between two tests."""

import pytest

from mntrain.comm import waits
from mntrain.comm.waits import BACKGROUND, BANDWIDTH_BOUND, LATENCY_BOUND, Backoff


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(waits.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("waited_s", "latency", "bandwidth", "background"),
    [
        (1e-3, 0.0, 0.125e-3, 0.125e-3),
        (0.1, 0.3e-3, 1e-3, 4e-3),
        (2.0, 2e-3, 2e-3, 4e-3),
        (5.0, 5e-3, 5e-3, 5e-3),
        (3600.0, 10e-3, 10e-3, 10e-3),
    ],
)
def test_sleeps_grow_with_the_wait_up_to_a_limit(clock, waited_s, latency, bandwidth, background):
    waiting = Backoff()
    clock[0] = waited_s
    delays = [waiting.delay(policy) for policy in (LATENCY_BOUND, BANDWIDTH_BOUND, BACKGROUND)]
    assert delays == pytest.approx([latency, bandwidth, background])


def test_after_a_completion_sleeps_are_a_quarter_of_recent_intervals(clock):
    waiting = Backoff()
    clock[0] = 60.0
    waiting.reset()  # the interval counts as 16 ms at most, by a quarter
    assert waiting.delay(BACKGROUND) == pytest.approx(1e-3)
    assert waiting.delay(LATENCY_BOUND) == 0
