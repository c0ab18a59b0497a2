"""Shares of a loader's batches in proportion to how fast ranks of a loop of one's own compute."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from mntrain.data.shares import INTERVAL, BatchNumber, Pace, Shares


class LoaderBalance:
    """The shares of the loaders of a dataset, and the speed of this rank.

    A rank's own time is that of its training thread from one request for a batch to the next, but
    for its waits for others: `waited_s` returns the seconds of these so far. (Those for a future of
    `World.gather_later` count as its own.) Its speed is the median over batches, since between some
    of them a loop evaluates or saves. `gather` is collective: every rank's object, by rank. `check`
    raises ValueError where parts must be equal, when a pass begins.
    """

    def __init__(
        self,
        size: int,
        gather: Callable[[Any], list[Any]],
        waited_s: Callable[[], float],
        check: Callable[[], None],
    ) -> None:
        self._shares = Shares(size)
        self._gather, self._waited_s, self._check = gather, waited_s, check
        self._start: float | None = None  # own time at the last request
        self._passes, self._batches, self._largest = 0, 0, 0
        self._per_sample: list[float] = []  # seconds, by batch since the last collection

    def bounds(self, samples: int, batch: BatchNumber) -> Sequence[int]:
        """Return the bounds of the ranks' parts of a batch. Local."""
        return self._shares.bounds(samples, batch)

    def plan(self, batch: BatchNumber) -> int:
        """Return the number of revisions before a batch. Local."""
        return self._shares.plan(batch)

    def begin_pass(self) -> int:
        """Begin a training pass, and return its number, which is the same on all ranks. Local."""
        self._check()
        self._passes += 1
        self._start = self._own_time()
        return self._passes

    def batch_done(self, own: int, total: int) -> None:
        """Count a batch, of which this rank had `own` samples of `total`. Collective.

        Called when the next one is asked for. Every few batches, ranks exchange their speeds.
        Raises RuntimeError on all ranks if they have begun other passes or taken other batches.
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
        place = self._passes, self._batches
        gathered = self._gather((place, Pace(samples, seconds, self._shares.drawn)))
        if any(other != place for other, _ in gathered):
            places = ", ".join(f"rank {r}: pass {p}" for r, ((p, _), _) in enumerate(gathered))
            raise RuntimeError(
                f"ranks have begun other passes over world.shard(balance=True) ({places}): iterate "
                "over it equally often on all ranks; to look at a batch, use the loader itself"
            )
        self._shares.revise([pace for _, pace in gathered], self._largest)
        self._start = self._own_time()

    def _own_time(self) -> float:
        return time.perf_counter() - self._waited_s()
