"""The clock of communication: it alone reads the time and sleeps, so that tests simulate both.

Its `Backoff` decides how long a thread sleeps between two tests of what it waits for.
"""

import ctypes
import time
from typing import NamedTuple

_libc = ctypes.CDLL(None)


class Policy(NamedTuple):
    """The sleeps of a thread between two tests."""

    eager_s: float  # of polling without sleeps
    first: float  # the share of the interval between answers that is slept through first
    max_sleep_s: float  # the longest sleep after that
    share: float  # it may be this share of the interval, if that is longer


# Of a caller that waits for one collective only: if it slept through a share of the interval,
# others would wait for it, and all would measure longer intervals.
LATENCY_BOUND = Policy(2e-3, 0.0, 0.3e-3, 1 / 16)
# Of one that waits for one of several, while other ranks may still compute on this core.
BANDWIDTH_BOUND = Policy(0.0, 1 / 2, 1e-3, 1 / 4)
# Of the engine's thread, while its own rank computes.
BACKGROUND = Policy(0.0, 1 / 2, 4e-3, 1 / 4)
MIN_SLEEP_S, MAX_INTERVAL_S = 20e-6, 16e-3
LONG_SLEEP_S = 10e-3  # at most, in a long wait: sleeps are a thousandth of it
QUICK_S = 0.5e-3  # where answers take longer, tests between them find nothing and cost a core


now = time.perf_counter
"""Seconds of the host's monotonic clock, which is also that of `time.monotonic`."""


def pause(seconds: float) -> None:
    """Sleep between two tests, and release the GIL; for 0 s, only yield the core.

    (time.sleep(0) would take about 100 us, since it sets a timer.)
    """
    if seconds:
        time.sleep(seconds)
    else:
        _libc.sched_yield()


class Backoff:
    """The time to sleep before the next test: a share of recent intervals, or of this one."""

    def __init__(self) -> None:
        self._since = now()
        self._interval_s = 0.0  # moving average of the time between completions

    def begin(self) -> None:
        """Start a wait, after a time in which there was nothing to wait for."""
        self._since = now()

    def reset(self) -> None:
        """Note a completion."""
        last, self._since = self._since, now()
        self._interval_s += (min(self._since - last, MAX_INTERVAL_S) - self._interval_s) / 4

    @property
    def waited_s(self) -> float:
        """Seconds since the last completion."""
        return now() - self._since

    @property
    def quick(self) -> bool:
        """True if recent answers came so quickly that polling is worth its cycles."""
        return self._interval_s < QUICK_S

    def delay(self, policy: Policy = LATENCY_BOUND) -> float:
        """Return the seconds to sleep now; 0 while polling is eager."""
        eager_s, first, max_sleep_s, share = policy
        waited_s, interval_s = self.waited_s, self._interval_s
        if waited_s < eager_s and self.quick:
            return 0.0
        most_s = max(max_sleep_s, interval_s * share, min(waited_s / 1000, LONG_SLEEP_S))
        first_s = interval_s * first
        due_s = max(first_s - waited_s, first_s / 8, waited_s / 8, MIN_SLEEP_S)
        return min(due_s, most_s)
