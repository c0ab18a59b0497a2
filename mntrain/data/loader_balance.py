"""Shares of a loader's batches in proportion to how fast ranks of a loop of one's own compute."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from mntrain.data.shares import INTERVAL, BatchNumber, Pace, Shares


class LoaderBalance:
    """The shares of one sharded loader, and the speed of this rank.

    A rank's own time is that of its training thread from one request for a batch to the next, but
    for its waits for others: `waited_s` returns the seconds of these so far. Its speed is the
    median over batches, since between some of them a loop evaluates or saves. `gather` is
    collective: every rank's object, by rank.
    """

    def __init__(
        self, size: int, gather: Callable[[Any], list[Any]], waited_s: Callable[[], float]
    ) -> None:
        self._shares = Shares(size)
        self._gather, self._waited_s = gather, waited_s
        self._start: float | None = None  # own time at the last request
        self._batches, self._largest = 0, 0
        self._per_sample: list[float] = []  # seconds, by batch since the last collection

    def bounds(self, samples: int, batch: BatchNumber) -> Sequence[int]:
        """Return the bounds of the ranks' parts of a batch. Local."""
        return self._shares.bounds(samples, batch)

    def begin_pass(self) -> None:
        """Begin a pass, before its first batch. Local."""
        self._start = self._own_time()

    def batch_done(self, own: int, total: int) -> None:
        """Count a batch, of which this rank had `own` samples of `total`. Collective.

        Called when the next one is asked for. Every few batches, ranks exchange their speeds.
        """
        now, start = self._own_time(), self._start
        self._start = now
        self._batches += 1
        self._largest = max(self._largest, total)  # the last one of an epoch may be small
        if own and self._batches > 1 and start is not None:  # the first one takes longer
            self._per_sample.append((now - start) / own)
        if self._batches % INTERVAL:
            return
        samples = len(self._per_sample)
        seconds = samples * median(self._per_sample) if samples else 0.0
        self._per_sample.clear()
        paces = self._gather(Pace(samples, seconds, self._shares.drawn))
        self._shares.revise(paces, self._largest)
        self._start = self._own_time()

    def _own_time(self) -> float:
        return time.perf_counter() - self._waited_s()
