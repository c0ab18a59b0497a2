"""When a run is to be saved."""

import math
import time
from collections.abc import Callable

MTBF_S = 24 * 3600.0  # mean time between failures of a job
RETRY_S = 60.0  # from a save that failed, and from the warning of it, to the next


class SaveInterval:
    """The interval between saves: a number of steps, minutes such as "10min", or "auto".

    "0" is none. With "auto", `auto_s` returns the seconds of the present interval.
    """

    def __init__(self, every: str, auto_s: Callable[[], float]) -> None:
        self.steps = int(every) if every.isdecimal() else 0
        self._seconds = auto_s if every == "auto" else None
        if every.endswith("min"):
            seconds = 60 * float(every.removesuffix("min"))
            self._seconds = lambda: seconds
        self._began = time.monotonic()
        self._retry_at: float | None = None  # after a save that failed

    @property
    def wanted(self) -> bool:
        """True if the run is to be saved at intervals at all."""
        return self.steps > 0 or self._seconds is not None

    @property
    def by_clock(self) -> bool:
        """True if the clock decides when the run is to be saved. The same on all ranks."""
        return self._seconds is not None or self._retry_at is not None

    def due_after(self, step: int) -> bool:
        """Return True if the run is to be saved after this step. The same on all ranks."""
        return self.steps > 0 and step % self.steps == 0

    def due_now(self) -> bool:
        """Return True if it is time to save, on the clock of this process."""
        now = time.monotonic()
        if self._retry_at is not None and now >= self._retry_at:
            return True
        return self._seconds is not None and now - self._began >= self._seconds()

    def begins(self) -> None:
        """Start the next interval. Local."""
        self._began, self._retry_at = time.monotonic(), None

    def failed(self) -> None:
        """Let the run be saved in a minute, if not before: a save has failed on all ranks."""
        if self.wanted:
            self._retry_at = time.monotonic() + RETRY_S


def cheapest_interval_s(save_s: float) -> float:
    """Return the interval that minimizes the time that saves and failures cost. Pure.

    Training waits `save_s` seconds for a save. J. W. Young, Communications of the ACM 17 (1974).
    """
    return math.sqrt(2 * save_s * MTBF_S)
