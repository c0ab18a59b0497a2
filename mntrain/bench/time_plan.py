"""Selection of the sizes for which a benchmark run has time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

# The hardware limit is a lower bound. Collectives also wait for each other and are verified.
_MARGIN = 1.25
_ROUNDED_TO_S = 10


@dataclass(frozen=True)
class TimePlan:
    """The time that one round of all collectives takes at least, by size in increasing order."""

    round_s: Mapping[int, float]

    def budget_s(self, nbytes: int, left_s: float) -> float | None:
        """Return the seconds to spend on a size if `left_s` are left for it and all larger ones.

        An equal part of the time that remains when one round of each larger size that fits has been
        set aside. None if not even one round of this size fits.
        """
        total = 0.0
        sizes = [size for size in self.round_s if size >= nbytes]
        ends = {size: (total := total + self.round_s[size]) for size in sizes}
        fitting = list(takewhile(lambda size: ends[size] <= left_s, sizes))
        if not fitting:
            return None
        spare_s = left_s - ends[fitting[-1]]
        return self.round_s[nbytes] + spare_s / len(fitting)

    def enough_s(self, prepared_s: float, spent_s: float, given_s: float) -> int:
        """Return a time limit within which every size fits, in a run like one that has ended.

        That one was to take `given_s`, and took `spent_s`, of which `prepared_s` for preparations.
        """
        enough_s = self._limit_s(prepared_s)
        # Otherwise collectives are so slow that what they have taken tells more than the hardware.
        return enough_s if enough_s > given_s else self._limit_s(spent_s)

    def _limit_s(self, other_s: float) -> int:
        whole_s = _MARGIN * (other_s + sum(self.round_s.values()))
        return _ROUNDED_TO_S * math.ceil(whole_s / _ROUNDED_TO_S)
