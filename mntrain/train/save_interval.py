"""How often a run is saved: by its steps, by the clock, or by what saving costs."""

import math
import time


class SaveInterval:
    """What `--checkpoint.every` asks for."""

    def __init__(self, every: str, mtbf_hours: float) -> None:
        self._steps = int(every) if every.isdecimal() else 0
        self._seconds = 60 * float(every.removesuffix("min")) if every.endswith("min") else None
        self._by_cost = every == "auto"
        self._mtbf_s = 3600 * mtbf_hours
        self._last = time.monotonic()

    @property
    def wanted(self) -> bool:
        """Whether the run is to be saved at all."""
        return self._steps > 0 or self.by_clock

    @property
    def by_clock(self) -> bool:
        """Whether time decides: then the master's."""
        return self._by_cost or self._seconds is not None

    def due_after(self, step: int) -> bool:
        """Whether a step is one to save after. The same on all ranks."""
        return self._steps > 0 and step % self._steps == 0

    def due_now(self) -> bool:
        """Whether it is time to save, by the clock of this process."""
        if not self.by_clock:
            return False
        return time.monotonic() - self._last >= (self._seconds or 0.0)

    def saved(self, cost_s: float) -> None:
        """Take note of a save that begins now, for which training waited so long."""
        self._last = time.monotonic()
        if self._by_cost:
            self._seconds = best_interval(cost_s, self._mtbf_s)


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between saves for which a job takes least time, failures included.

    cost_s: seconds that training waits for a save; mtbf_s: mean seconds between failures.
    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart
    dumps, Future Generation Computer Systems 22 (2006), equation 37; its first term is J. W.
    Young's (Communications of the ACM 17, 1974).
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s
