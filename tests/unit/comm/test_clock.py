"""Sleeps between tests, by a clock that is stood in for."""

import pytest
from sharding import Clock

from mntrain.comm import clock
from mntrain.comm.clock import BACKGROUND, BANDWIDTH_BOUND, LATENCY_BOUND, Backoff


@pytest.fixture
def host(monkeypatch):
    """The clock of the host, in seconds."""
    host = Clock()
    monkeypatch.setattr(clock, "now", host.perf_counter)
    return host


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
def test_sleeps_grow_with_the_wait_up_to_a_limit(host, waited_s, latency, bandwidth, background):
    waiting = Backoff()
    host.now = waited_s
    delays = [waiting.delay(policy) for policy in (LATENCY_BOUND, BANDWIDTH_BOUND, BACKGROUND)]
    assert delays == pytest.approx([latency, bandwidth, background])


def test_a_thread_polls_where_recent_answers_came_quickly(host):
    waiting = Backoff()
    for _ in range(20):
        host.now += 0.1e-3
        waiting.reset()
    assert waiting.delay(LATENCY_BOUND) == 0
    assert waiting.delay(BANDWIDTH_BOUND) == pytest.approx(50e-6, rel=0.01)


def test_a_caller_of_one_collective_does_not_sleep_through_what_earlier_ones_took(host):
    waiting = Backoff()
    for _ in range(20):
        host.now += 2e-3
        waiting.reset()
    assert waiting.delay(LATENCY_BOUND) == pytest.approx(20e-6)
    assert waiting.delay(BANDWIDTH_BOUND) == pytest.approx(1e-3, rel=0.01)
