"""Waiting by polling: eager where an answer is near, asleep where it is not."""

import ctypes
import time
from typing import NamedTuple

_libc = ctypes.CDLL(None)


def pause(seconds: float) -> None:
    """Sleep and release the GIL; for 0 s, only yield the core to another thread or process.

    (time.sleep(0) would take about 100 us, since it sets a timer.)
    """
    if seconds:
        time.sleep(seconds)
    else:
        _libc.sched_yield()


class WaitPolicy(NamedTuple):
    """Polling without sleeps for `eager_s` seconds, then with sleeps up to `max_sleep_s`.

    In a long wait sleeps are longer: a thousandth of it, up to `LONG_SLEEP_S`.
    """

    eager_s: float
    max_sleep_s: float


# For a caller that waits for one collective only; for one of several, while other ranks may still
# compute on this core; for the engine's thread, while its own rank computes.
LATENCY_BOUND = WaitPolicy(2e-3, 0.3e-3)
BANDWIDTH_BOUND = WaitPolicy(0, 1e-3)
BACKGROUND = WaitPolicy(0, 4e-3)
MIN_SLEEP_S, MAX_INTERVAL_S = 20e-6, 4 * BACKGROUND.max_sleep_s
LONG_SLEEP_S = 10e-3


class Backoff:
    """The time to sleep before the next test: a fraction of recent intervals and of this wait."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._interval_s = 0.0  # moving average of the time between completions

    def begin(self) -> None:
        """Start a wait, after a time in which there was nothing to wait for."""
        self._since = time.perf_counter()

    def reset(self) -> None:
        """Note a completion."""
        now = time.perf_counter()
        self._interval_s += (min(now - self._since, MAX_INTERVAL_S) - self._interval_s) / 4
        self._since = now

    @property
    def waited_s(self) -> float:
        """Seconds since the last completion."""
        return time.perf_counter() - self._since

    def delay(self, policy: WaitPolicy = LATENCY_BOUND) -> float:
        """Return the seconds to sleep now; 0 while polling is eager."""
        waited_s = self.waited_s
        if waited_s < policy.eager_s:
            return 0.0
        most_s = max(policy.max_sleep_s, min(waited_s / 1000, LONG_SLEEP_S))
        return min(max(self._interval_s / 4, waited_s / 8, MIN_SLEEP_S), most_s)
