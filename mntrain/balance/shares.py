"""Shares of a global batch in proportion to how fast ranks compute.

    batch:   1 ... 10   11 ... 60      61 ... 110         ranks gather their speeds every 10 batches
    shares:  equal      by speed       revised, if it pays

Each rank adds up its samples and the seconds of its own computing. All ranks derive the same shares
from the numbers of all. A share is a contiguous part of the batch, so the global order of samples
is that of equal shares.

Nothing in this module communicates.
"""

import math
from bisect import bisect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from mntrain.balance.own_pace import INTERVAL, BatchNumber, Pace
from zero.layout import split

CALIBRATION = 10  # batches with equal shares, or with those of given speeds
REVISION = 50  # batches between revisions of the shares
SMOOTHING = 0.3  # weight of the latest interval in the exponential mean of a rank's speed
LEAST = 0.05  # of the equal share, that every rank gets at least
GAIN = 1.05  # by which a revision must shorten the expected time of a batch


@lru_cache(maxsize=64)
def share_bounds(
    samples: int,
    size: int,
    speeds: tuple[float, ...] | None,
    most: tuple[int | None, ...] | None = None,
) -> tuple[int, ...]:
    """Return the size + 1 bounds of the ranks' parts of a batch, of which the slowest is fastest.

    `speeds` are in samples per second, by rank; None gives parts that are equal to within one, and
    so does a batch with fewer samples than there are ranks. Every rank gets a sample, and at least
    `LEAST` of an equal part. `most` limits the part of each rank, to no less than the largest of
    equal parts.
    """
    if speeds is None or samples < size:
        return split(samples, size)
    equal, total = -(-samples // size), sum(speeds)
    limits = [samples if limit is None else max(limit, equal) for limit in most or [None] * size]
    least = max(1, math.ceil(LEAST * samples / size))
    counts = [
        min(limit, max(least, int(samples * speed / total)))
        for limit, speed in zip(limits, speeds, strict=True)
    ]
    while (left := samples - sum(counts)) > 0:
        free = [rank for rank in range(size) if counts[rank] < limits[rank]]
        counts[min(free, key=lambda r: ((counts[r] + 1) / speeds[r], r))] += 1
    for _ in range(-left):
        spare = (rank for rank in range(size) if counts[rank] > least)
        counts[max(spare, key=lambda r: (counts[r] / speeds[r], r))] -= 1
    return tuple(accumulate(counts, initial=0))


class BatchDivision:
    """Division of batches between ranks, which is revised. Every rank holds an equal one.

    Each of its `revisions` has the `first` batch that it holds for, which no rank had drawn before.
    """

    def __init__(self, first: Any) -> None:
        self.revisions: list[Any] = [first]
        self.drawn: BatchNumber = first.first  # the last that this rank has divided
        self._speeds: tuple[float, ...] | None = None  # measured, smoothed
        self._since, self._due = 0, CALIBRATION  # batches since the last revision, and to the next

    def index(self, batch: BatchNumber) -> int:
        """Return the index in `revisions` of that of a batch."""
        return bisect(self.revisions, batch, key=attrgetter("first")) - 1

    def bounds(self, samples: int, batch: BatchNumber) -> Sequence[int]:
        """Return the bounds of the ranks' parts of a batch."""
        raise NotImplementedError

    def divide(self, samples: int, batch: BatchNumber, done: int = 0) -> tuple[Sequence[int], int]:
        """Return the `bounds` and the `index` of a batch, of a pass whose first one is `done`."""
        place = batch._replace(batch=done + batch.batch)
        self.drawn = max(self.drawn, place)
        return self.bounds(samples, place), self.index(place)

    def _measured(self, paces: Sequence[Pace]) -> tuple[float, ...] | None:
        """Take the paces of all ranks over an interval; return their speeds if a revision is due.

        In samples per second. The same on all ranks, for the same paces.
        """
        self._speeds = smoothed(self._speeds, paces)
        self._since += INTERVAL
        if self._speeds is None or self._since < self._due:
            return None
        self._since, self._due = 0, REVISION
        return self._speeds


class SharesRevision(NamedTuple):
    """Speeds and limits that the shares follow from a batch on."""

    first: BatchNumber
    speeds: tuple[float, ...] | None  # by rank; None: equal shares
    most: tuple[int | None, ...]  # samples, by rank


class Shares(BatchDivision):
    """The shares of all ranks in batches of `samples`.

    `hints` are relative speeds that are known before any was measured, by rank. They hold until the
    end of the calibration, which begins with batch `first`. `most` limits the samples of each rank,
    as `Pace.most` does from the next revision on.
    """

    name = "shares"  # in summary.json

    def __init__(
        self,
        size: int,
        samples: int,
        hints: tuple[float, ...] | None = None,
        *,
        first: int = 0,
        most: int | None = None,
    ) -> None:
        super().__init__(SharesRevision(BatchNumber(0, first), hints, (most,) * size))
        self.samples = samples
        self._size, self._most = size, most

    def bounds(self, samples: int, batch: BatchNumber) -> tuple[int, ...]:
        """Return the bounds of the ranks' parts of a batch: see `share_bounds`."""
        revision = self.revisions[self.index(batch)]
        return share_bounds(samples, self._size, revision.speeds, revision.most)

    def revise(self, paces: Sequence[Pace]) -> SharesRevision | None:
        """Take the paces of all ranks over an interval, and revise the shares if that is due.

        Returns the new revision, None if there is none; the same on all ranks, for the same paces.
        """
        speeds = self._measured(paces)
        if speeds is None:
            return None
        most = tuple(self._most if pace.most is None else pace.most for pace in paces)
        first = max(pace.drawn for pace in paces)
        revision = SharesRevision(first._replace(batch=first.batch + 1), speeds, most)
        if self._seconds(self.revisions[-1], speeds) < GAIN * self._seconds(revision, speeds):
            return None
        self.revisions.append(revision)
        return revision

    def _seconds(self, revision: SharesRevision, speeds: Sequence[float]) -> float:
        """Return the time of the slowest rank for a batch."""
        return max(n / speed for n, speed in zip(self.counts(revision), speeds, strict=True))

    def counts(self, revision: SharesRevision) -> list[int]:
        """Return the samples of each rank in a whole batch under a revision."""
        bounds = share_bounds(self.samples, self._size, revision.speeds, revision.most)
        return [stop - start for start, stop in pairwise(bounds)]

    def entry(self, revision: SharesRevision) -> dict[str, Any] | None:
        """Return a revision's entry in summary.json; None of equal shares."""
        if revision.speeds is None:
            return None
        return {"step": revision.first.batch + 1, "samples": self.counts(revision)}

    def describe(self) -> str:
        """Return the latest revision in words."""
        counts = ", ".join(map(str, self.counts(self.revisions[-1])))
        return f"ranks have {counts} of {self.samples} samples"


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
