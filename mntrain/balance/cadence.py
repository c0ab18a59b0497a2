"""Whole micro-batches of each rank between two reductions, for ranks of very unequal speed.

    slowest rank      [    1    ][    2    ] ... [ anchor  ]
    twice as fast     [ 1  ][ 2  ][ 3  ][ 4  ] ... [2 anchor]      then one reduction, one update

The slowest rank has `anchor` micro-batches in a step, and faster ones proportionally more. A larger
anchor makes reductions rarer, so that communication takes a smaller part of the time; it also makes
the batch of a step larger. All ranks derive the same numbers from the numbers of all.

Nothing in this module communicates.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, NamedTuple

from mntrain.balance.own_pace import BatchNumber, Pace
from mntrain.balance.shares import GAIN, SMOOTHING, BatchDivision, share_bounds

FIRST_ANCHOR = 10  # before communication is measured
AIM = 0.8  # of the overhead target, for which a new anchor is chosen
WELL_BELOW = 0.5  # of the overhead target, below which the anchor shrinks
LEAST_CHANGE = 1.2  # ratio of two anchors from which the numbers are revised for it
LEAST_STEPS = 10  # of an epoch, if the largest anchor is automatic


class CadenceRevision(NamedTuple):
    """The micro-batches of the ranks in a step, from one step on."""

    first: BatchNumber  # step, 0 for the first of a run
    anchor: int
    counts: tuple[int, ...]  # micro-batches, by rank
    overhead: float | None = None  # communication / computing that was measured before


def micro_batch_counts(anchor: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the micro-batches of each rank: `anchor` on the slowest, and at least one."""
    slowest = min(speeds)
    return tuple(max(1, round(anchor * (speed / slowest))) for speed in speeds)


def efficiency(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the part of the time in which ranks compute, if they wait only for the last one.

    Weighted by their speeds: 1 if all of them end at the same time.
    """
    slowest_s = max(count / speed for count, speed in zip(counts, speeds, strict=True))
    return sum(counts) / (slowest_s * sum(speeds))


def tuned_anchor(
    anchor: int, speeds: Sequence[float], micro_batch: int, communication_s: float, target: float
) -> int:
    """Return an anchor with which communication takes less than `target` of computing.

    `speeds` are in samples per second, and `communication_s` is that of one reduction. The anchor
    stays where communication takes between half of the target and the target. A smaller one must
    not make ranks wait for each other because counts are whole numbers.
    """
    own_s = micro_batch / min(speeds)
    overhead = communication_s / (anchor * own_s)
    if WELL_BELOW * target <= overhead <= target:
        return anchor
    wanted = max(1, math.ceil(communication_s / (AIM * target * own_s)))
    least = min(efficiency(micro_batch_counts(anchor, speeds), speeds), 1 / GAIN)
    smaller = range(wanted, anchor)
    good = (a for a in smaller if efficiency(micro_batch_counts(a, speeds), speeds) >= least)
    return next(good, max(anchor, wanted))


class Cadence(BatchDivision):
    """The micro-batches of the ranks of a job by step.

    An epoch has `samples`, and a step at most all of them. `target` is the part of computing that
    communication may take. `max_anchor` limits the anchor: 0 does not, and None lets an epoch have
    10 steps, if an anchor of 1 does. Without `tunes` the anchor stays at 10, or below at its limit.
    `hints` are relative speeds that are known before, by rank. Raises ValueError for fewer samples
    than the first step has.
    """

    name = "cadence"  # in summary.json

    def __init__(
        self,
        size: int,
        micro_batch: int,
        samples: int,
        hints: tuple[float, ...] | None = None,
        *,
        first: int = 0,
        target: float,
        max_anchor: int | None,
        tunes: bool = True,
    ) -> None:
        self.micro_batch = micro_batch
        self._epoch = samples // micro_batch  # micro-batches
        self._target, self._max_anchor, self._tunes = target, max_anchor, tunes
        self._communication_s: float | None = None  # of a reduction, smoothed
        speeds = hints or (1.0,) * size
        anchor = self._bounded(FIRST_ANCHOR, speeds)
        least = size if max_anchor is None else sum(micro_batch_counts(anchor, speeds))
        if self._epoch < least:
            smaller = "" if max_anchor is None else ", or --balance.max-anchor none"
            raise ValueError(
                f"the dataset has {samples} samples, and the first step takes {least} micro-batches"
                f" of {micro_batch} on {size} ranks: give a smaller --train.micro-batch-size"
                + smaller
            )
        super().__init__(
            CadenceRevision(BatchNumber(0, first), anchor, self._counts(anchor, speeds))
        )

    @property
    def latest(self) -> CadenceRevision:
        """The revision of the last steps."""
        revision: CadenceRevision = self.revisions[-1]
        return revision

    def samples(self, index: int) -> int:
        """Return the samples of a whole batch under a revision, by its index."""
        revision: CadenceRevision = self.revisions[index]
        return sum(revision.counts) * self.micro_batch

    def bounds(self, samples: int, batch: BatchNumber) -> Sequence[int]:
        """Return the bounds of the ranks' parts, in the same proportion in a smaller last batch."""
        index = self.index(batch)
        counts = self.revisions[index].counts
        if samples < self.samples(index):
            return share_bounds(samples, len(counts), counts)
        return tuple(accumulate((count * self.micro_batch for count in counts), initial=0))

    def revise(self, paces: Sequence[Pace]) -> CadenceRevision | None:
        """Take the paces of all ranks over an interval, and revise the numbers if that is due.

        Returns the new revision, None if there is none; the same on all ranks, for the same paces.
        """
        self._communication_s = _smoothed_seconds(self._communication_s, paces)
        speeds = self._measured(paces)
        if speeds is None or self._communication_s is None:
            return None
        now, anchor = self.latest, self.latest.anchor
        if self._tunes:
            measured = speeds, self.micro_batch, self._communication_s, self._target
            anchor = self._bounded(tuned_anchor(anchor, *measured), speeds)
            if max(anchor, now.anchor) < LEAST_CHANGE * min(anchor, now.anchor):
                anchor = now.anchor
        counts = self._counts(anchor, speeds)
        faster = efficiency(counts, speeds) / efficiency(now.counts, speeds)
        if counts == now.counts or (anchor == now.anchor and faster < GAIN):
            return None
        computing_s = max(c * self.micro_batch / s for c, s in zip(now.counts, speeds, strict=True))
        first = BatchNumber(0, max(pace.drawn for pace in paces).batch + 1)
        self.revisions.append(
            CadenceRevision(first, anchor, counts, self._communication_s / computing_s)
        )
        return self.latest

    def entry(self, revision: CadenceRevision) -> dict[str, Any]:
        """Return a revision's entry in summary.json."""
        counts = list(revision.counts)
        named = {"anchor": revision.anchor, "batch_counts": counts, "overhead": revision.overhead}
        return {"step": revision.first.batch + 1, **named}

    def describe(self) -> str:
        """Return the latest revision in words."""
        counts, overhead = ", ".join(map(str, self.latest.counts)), self.latest.overhead or 0
        return (
            f"ranks have {counts} micro-batches of {self.micro_batch} samples in a step; "
            f"communication has taken {overhead:.1%} of computing"
        )

    def _bounded(self, anchor: int, speeds: Sequence[float]) -> int:
        if self._max_anchor is not None:
            return min(anchor, self._max_anchor or anchor)
        most = self._epoch // LEAST_STEPS  # micro-batches of a step
        return max(1, min(anchor, anchor * most // sum(micro_batch_counts(anchor, speeds))))

    def _counts(self, anchor: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
        """Return the micro-batches of each rank: together at most those of an epoch."""
        counts = micro_batch_counts(anchor, speeds)
        if sum(counts) <= self._epoch:
            return counts
        bounds = share_bounds(self._epoch, len(speeds), speeds)
        return tuple(stop - start for start, stop in pairwise(bounds))


def _smoothed_seconds(before: float | None, paces: Sequence[Pace]) -> float | None:
    """Return the exponential mean of the seconds that a reduction takes.

    In each step, the rank that waits the least is the last one there: it waits for no other, but
    for communication alone. Of an interval, it is the median over its steps.
    """
    steps = [min(waits) for waits in zip(*(pace.waits for pace in paces), strict=True)]
    if not steps:
        return before
    latest = float(median(steps))
    return latest if before is None else SMOOTHING * latest + (1 - SMOOTHING) * before
