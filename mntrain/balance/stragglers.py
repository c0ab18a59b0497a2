"""Ranks that take longer for a sample than the others, over several intervals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from mntrain.balance.own_pace import INTERVAL, Pace

SLOW, RECOVERED = 1.5, 1.25  # times the median of the other ranks
LASTING = 2  # intervals for which a rank must be slow, or no longer slow, to be named


@dataclass(frozen=True)
class Straggler:
    """A rank that was slow from step `since` to `until`; None: it still is."""

    rank: int
    since: int
    ratio: float  # its seconds per sample, in medians of the other ranks, when it was named
    phase: str  # with the largest part of the difference; empty in own loops
    until: int | None = None


class Stragglers:
    """The slow ranks among `size` ranks. Every rank holds an equal one; local."""

    def __init__(self, size: int) -> None:
        self.found: list[Straggler] = []  # by the step at which they were named
        self._intervals = [0] * size  # for which a rank's state has contradicted what was said

    def update(self, step: int, by_rank: Sequence[Pace]) -> list[Straggler]:
        """Take the ranks' paces of an interval that ends at a step; return what has changed.

        A rank without samples in the interval is passed over.
        """
        changed = []
        for rank, pace in enumerate(by_rank):
            others = [other for other in by_rank if other is not pace and other.samples]
            if not pace.samples or not others:
                continue
            usual = median(other.seconds / other.samples for other in others)
            ratio = pace.seconds / pace.samples / usual if usual > 0 else 1.0
            named = next((s for s in self.found if s.rank == rank and s.until is None), None)
            contradicts = ratio < RECOVERED if named else ratio > SLOW
            self._intervals[rank] = self._intervals[rank] + 1 if contradicts else 0
            if self._intervals[rank] < LASTING:
                continue
            self._intervals[rank] = 0
            began = step - LASTING * INTERVAL
            if named:
                latest = replace(named, until=began)
                self.found[self.found.index(named)] = latest
            else:
                latest = Straggler(rank, began + 1, ratio, _slowest_phase(pace, others))
                self.found.append(latest)
            changed.append(latest)
        return changed


def _slowest_phase(slow: Pace, others: Sequence[Pace]) -> str:
    def lost_s(phase: str) -> float:
        own, *usual = (
            (pace.phases or {}).get(phase, 0.0) / pace.samples for pace in (slow, *others)
        )
        return own - median(usual)

    return max(slow.phases or {}, key=lost_s)
