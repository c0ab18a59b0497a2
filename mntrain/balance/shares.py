"""Shares of a global batch in proportion to how fast ranks compute.

    batch:   1 ... 10   11 ... 60      61 ... 110         ranks gather their speeds every 10 batches
    shares:  equal      first plan     next one, if it pays

Each rank adds up its samples and the seconds of its own computing. All ranks derive the same shares
from the numbers of all. A share is a contiguous part of the batch, so the global order of samples
is that of equal shares.

Nothing in this module communicates.
"""

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

from mntrain.balance.own_pace import INTERVAL, BatchNumber, Pace
from zero.layout import split

CALIBRATION = 10  # batches with equal shares, or with those of given speeds
REVISION = 50  # batches between revisions of the shares
SMOOTHING = 0.3  # weight of the latest interval in the exponential mean of a rank's speed
LEAST = 0.05  # of the equal share, that every rank gets at least
GAIN = 1.05  # by which a revision must shorten the expected time of a batch


def share_bounds(
    samples: int,
    size: int,
    speeds: Sequence[float] | None,
    most: Sequence[int | None] | None = None,
) -> tuple[int, ...]:
    """Return the size + 1 bounds of the ranks' parts of a batch.

    `speeds` are in samples per second, by rank; None gives parts that are equal to within one, and
    so does a batch with fewer samples than there are ranks. `most` limits the part of each rank, to
    no less than the largest of equal parts.
    """
    if speeds is None or samples < size:
        return split(samples, size)
    equal = -(-samples // size)
    limits = (samples if limit is None else max(limit, equal) for limit in most or [None] * size)
    return _bounds_by_speed(samples, tuple(speeds), tuple(limits))


@lru_cache(maxsize=64)
def _bounds_by_speed(
    samples: int, speeds: tuple[float, ...], most: tuple[int, ...]
) -> tuple[int, ...]:
    """Return bounds with which the slowest part of a batch takes as little time as possible.

    Every rank gets a sample, and at least `LEAST` of an equal part.
    """
    size, total = len(speeds), sum(speeds)
    least = max(1, math.ceil(LEAST * samples / size))
    counts = [
        min(limit, max(least, int(samples * speed / total)))
        for limit, speed in zip(most, speeds, strict=True)
    ]
    while (left := samples - sum(counts)) > 0:
        free = [rank for rank in range(size) if counts[rank] < most[rank]]
        counts[min(free, key=lambda r: ((counts[r] + 1) / speeds[r], r))] += 1
    for _ in range(-left):
        spare = (rank for rank in range(size) if counts[rank] > least)
        counts[max(spare, key=lambda r: (counts[r] / speeds[r], r))] -= 1
    return tuple(accumulate(counts, initial=0))


def hinted_speeds(size: int, hints: Mapping[int, float]) -> tuple[float, ...]:
    """Return the relative speeds of all ranks: those of `hints`, by rank, and 1 of others.

    Raises ValueError for a rank that does not exist and for a speed that is not above 0.
    """
    for rank, ratio in hints.items():
        if not 0 <= rank < size:
            raise ValueError(f"speed {ratio:g} is of rank {rank}: give ranks from 0 to {size - 1}")
        if not 0 < ratio < math.inf:
            raise ValueError(f"the speed of rank {rank} is {ratio:g}: give a number above 0")
    return tuple(float(hints.get(rank, 1.0)) for rank in range(size))


class Calibration:
    """The smoothed speeds of all ranks, and the times at which a plan may follow them."""

    def __init__(self) -> None:
        self._speeds: tuple[float, ...] | None = None
        self._since = 0  # batches since a plan could last be revised
        self._first = True

    def collect(self, paces: Sequence[Pace]) -> tuple[float, ...] | None:
        """Take the paces of all ranks over an interval; return their speeds if a revision is due.

        In samples per second. The same on all ranks, for the same paces.
        """
        self._speeds = smoothed(self._speeds, paces)
        self._since += INTERVAL
        if self._speeds is None or self._since < (CALIBRATION if self._first else REVISION):
            return None
        self._since, self._first = 0, False
        return self._speeds


class _Plan(NamedTuple):
    """Speeds and limits that the shares follow from a batch on."""

    first: BatchNumber
    speeds: tuple[float, ...] | None  # by rank; None: equal shares
    most: tuple[int | None, ...]  # samples, by rank


class Shares:
    """The shares of all ranks from each batch on. Every rank holds an equal one.

    `hints` are relative speeds that are known before any was measured, by rank. They hold until the
    end of the calibration. `most` limits the samples of each rank, as `Pace.most` does from the
    next revision on. Raises ValueError for hints that `hinted_speeds` refuses.
    """

    def __init__(
        self, size: int, hints: Mapping[int, float] | None = None, *, most: int | None = None
    ) -> None:
        self.size, self._most = size, most
        hinted = hinted_speeds(size, hints or {})
        self._plans = [_Plan(BatchNumber(0, 0), hinted if hints else None, (most,) * size)]
        self.drawn = BatchNumber(0, 0)  # the last batch whose bounds this rank has asked for
        self._calibration = Calibration()

    def bounds(self, samples: int, batch: BatchNumber) -> tuple[int, ...]:
        """Return the bounds of the ranks' parts of a batch: see `share_bounds`."""
        self.drawn = max(self.drawn, batch)
        plan = self._plans[self.plan(batch)]
        return share_bounds(samples, self.size, plan.speeds, plan.most)

    def plan(self, batch: BatchNumber) -> int:
        """Return the number of revisions before a batch."""
        return bisect(self._plans, batch, key=attrgetter("first")) - 1

    @property
    def planned(self) -> bool:
        """True if shares follow speeds that are given or measured."""
        return self._plans[-1].speeds is not None

    def counts(self, samples: int) -> list[int]:
        """Return the samples of each rank in a batch under the latest plan."""
        plan = self._plans[-1]
        bounds = share_bounds(samples, self.size, plan.speeds, plan.most)
        return [stop - start for start, stop in pairwise(bounds)]

    def revise(self, paces: Sequence[Pace], samples: int) -> BatchNumber | None:
        """Take the paces of all ranks over an interval, and revise the shares if that is due.

        `samples` is the size of a batch. Returns the first batch with new shares, which no rank has
        drawn yet; None if the shares stay. The same on all ranks, for the same paces.
        """
        measured = self._calibration.collect(paces)
        if measured is None:
            return None
        latest = self._plans[-1]
        most = tuple(self._most if pace.most is None else pace.most for pace in paces)
        now = batch_seconds(samples, measured, latest.speeds, latest.most)
        then = batch_seconds(samples, measured, measured, most)
        if now < GAIN * then:
            return None
        last = max(pace.drawn for pace in paces)
        first = BatchNumber(last.of_pass, last.batch + 1)
        self._plans.append(_Plan(first, measured, most))
        return first


def smoothed(before: tuple[float, ...] | None, paces: Sequence[Pace]) -> tuple[float, ...] | None:
    """Return the exponential means of the ranks' speeds, in samples per second.

    A rank that has computed nothing keeps its speed. None as long as a rank has none.
    """
    speeds = []
    for rank, pace in enumerate(paces):
        old = before[rank] if before else None
        new = pace.samples / pace.seconds if pace.samples and pace.seconds > 0 else old
        if new is None:
            return None
        speeds.append(new if old is None else SMOOTHING * new + (1 - SMOOTHING) * old)
    return tuple(speeds)


def batch_seconds(
    samples: int,
    speeds: Sequence[float],
    planned: Sequence[float] | None,
    most: Sequence[int | None] | None = None,
) -> float:
    """Return the time of the slowest rank for a batch that is divided by `planned` speeds."""
    bounds = share_bounds(samples, len(speeds), planned, most)
    return max((bounds[r + 1] - bounds[r]) / speed for r, speed in enumerate(speeds))
