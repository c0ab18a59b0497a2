"""When the time after a signal is over."""

import signal
import time

from mntrain.watchdog import grace
from mntrain.watchdog.grace import Grace

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})


def test_the_first_signal_begins_the_time():
    left = Grace(SIGNALS, 5.0, second_ends=True, option="--run.grace")
    now = time.monotonic()
    assert not left.over(now + 1000)
    left.arrived(signal.SIGTERM, 2)
    assert not left.over(now + 4)
    assert left.over(now + 6)
    assert "SIGTERM on rank 2: the step has not ended within 5 s (--run.grace)" in left.reason
    assert not left.interrupt


def test_a_second_signal_ends_the_time_unless_it_is_the_first_passed_on(monkeypatch):
    left = Grace(SIGNALS, 1000.0, second_ends=True)
    left.arrived(signal.SIGINT, 0)
    left.arrived(signal.SIGINT, 0)
    assert not left.over(time.monotonic())
    monkeypatch.setattr(grace, "_SENDERS_S", 0.0)
    left.arrived(signal.SIGUSR1, 0)
    assert not left.over(time.monotonic())
    left.arrived(signal.SIGINT, 0)
    assert left.over(time.monotonic())
    assert left.interrupt


def test_other_signals_and_a_world_of_one_are_left_alone(monkeypatch):
    monkeypatch.setattr(grace, "_SENDERS_S", 0.0)
    left = Grace(SIGNALS, 1000.0, second_ends=False)
    left.arrived(signal.SIGHUP, 0)
    assert left.reason == ""
    left.arrived(signal.SIGINT, 0)
    left.arrived(signal.SIGINT, 0)
    assert not left.over(time.monotonic())
