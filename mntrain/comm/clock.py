"""The clock of communication: it alone reads the time and sleeps, so that tests simulate both."""

import ctypes
import time

_libc = ctypes.CDLL(None)


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
