"""Detection of ranks that compute more slowly than the others."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from mntrain.data.shares import INTERVAL, Pace

SLOW, RECOVERED = 1.5, 1.25  # times the median of the other ranks
LASTING = 2  # intervals for which a rank must be slow, or no longer slow, to be named


@dataclass(frozen=True)
class Straggler:
    """A rank that was slow from step `since` to `until`; None: it still is."""

    rank: int
    since: int
    ratio: float  # its seconds per sample, in medians of the other ranks, when it was named
    phase: str  # with the largest part of the difference
    until: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


class Stragglers:
    """The slow ranks of a job of `size` ranks. Every rank holds an equal one; local."""

    def __init__(self, size: int) -> None:
        self.found: list[Straggler] = []  # by the step at which they were named
        self._intervals = [0] * size  # for which a rank's state has contradicted what was said

    def update(
        self, step: int, by_rank: Sequence[tuple[Pace, Mapping[str, float]]]
    ) -> list[Straggler]:
        """Take the paces and phases of an interval that ends at a step; return what has changed.

        By rank; a phase is its seconds. A rank without samples in the interval is passed over.
        """
        changed = []
        for rank, (pace, _) in enumerate(by_rank):
            others = [other for other, _ in by_rank if other is not pace and other.samples]
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
                latest = Straggler(rank, began + 1, ratio, _slowest_phase(rank, by_rank))
                self.found.append(latest)
            changed.append(latest)
        return changed


def _slowest_phase(rank: int, by_rank: Sequence[tuple[Pace, Mapping[str, float]]]) -> str:
    """Return the phase in which a rank exceeds the others' median per sample by most."""
    per_sample = [
        {phase: seconds / pace.samples for phase, seconds in phases.items()}
        for pace, phases in by_rank
        if pace.samples
    ]
    own_pace, own = by_rank[rank]
    usual = {phase: median(other[phase] for other in per_sample) for phase in own}
    return max(own, key=lambda phase: own[phase] / own_pace.samples - usual[phase])
