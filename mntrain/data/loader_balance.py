"""Shares of a loader's batches in proportion to how fast ranks of a loop of one's own compute."""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

from mntrain.data.shares import INTERVAL, BatchNumber, Pace, Shares


class OwnClock(Protocol):
    """A clock that stands still while this rank waits for others: `mntrain.comm.waits.Waits`."""

    def mark(self) -> Any:
        """Return this point in the rank's work. Does not wait for a device."""

    def own_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks. May wait for the device to come to `end`."""


class LoaderBalance:
    """The shares of the loaders of a dataset, or of several in turn, and the speed of this rank.

    A rank's own time is that of its training thread, or of the stream of its GPU, from one request
    for a batch to the next, but for its waits for others, as `clock` measures it. (Waits for a
    future of `World.gather_later` count as its own.) Its speed is the median over batches, since
    between some of them a loop evaluates or saves. `room` returns the factor by which the most
    memory that it has needed so far may grow. `gather` is collective: every rank's object, by rank.
    `check` raises ValueError where parts must be equal, when a pass begins.
    """

    def __init__(
        self,
        size: int,
        gather: Callable[[Any], list[Any]],
        clock: OwnClock,
        room: Callable[[], float],
        check: Callable[[], None],
    ) -> None:
        self._shares = Shares(size)
        self._gather, self._clock, self._room, self._check = gather, clock, room, check
        self._start: Any = None  # mark of the last request
        self._passes, self._batches = 0, 0
        self._handed_over = 0  # passes, when another dataset last took over
        self._largest, self._largest_own = 0, 0  # samples of a batch, and of this rank's part
        # Samples and marks, by batch since the last collection.
        self._taken: list[tuple[int, Any, Any]] = []

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
        self._start = self._clock.mark()
        return self._passes

    def hand_over(self) -> bool:
        """Return True if the next dataset may go on with these speeds, once after a pass. Local.

        Not while a pass is under way: two loaders at a time need clocks of their own.
        """
        free = self._start is None and self._passes > self._handed_over
        if free:
            self._handed_over = self._passes
        return free

    def end_pass(self, number: int) -> None:
        """End a training pass, unless another one has begun. Local; waits for no device.

        No mark outlives it: a clock keeps what follows its marks.
        """
        if number == self._passes:
            self._start = None
            self._taken.clear()

    def batch_done(self, own: int, total: int) -> None:
        """Count a batch, of which this rank had `own` samples of `total`. Collective.

        Called when the next one is asked for. Every few batches, ranks exchange their speeds; this
        waits for a GPU.
        Raises RuntimeError on all ranks if they have begun other passes or taken other batches.
        """
        now, start = self._clock.mark(), self._start
        self._start = now
        self._batches += 1
        self._largest = max(self._largest, total)  # the last one of an epoch may be small
        self._largest_own = max(self._largest_own, own)
        if own and self._batches > 1 and start is not None:  # the first one takes longer
            self._taken.append((own, start, now))
        if self._batches % INTERVAL:
            return
        place = self._passes, self._batches
        gathered = self._gather((place, self._pace()))
        if any(other != place for other, _ in gathered):
            places = ", ".join(f"rank {r}: pass {p}" for r, ((p, _), _) in enumerate(gathered))
            raise RuntimeError(
                f"ranks have begun other passes over world.shard(balance=True) ({places}): iterate "
                "over it equally often on all ranks; to look at a batch, use the loader itself"
            )
        self._shares.revise([pace for _, pace in gathered], self._largest)
        self._start = self._clock.mark()

    def _pace(self) -> Pace:
        """Return this rank's pace since the last call. Waits for its device."""
        per_sample = [self._clock.own_s(start, end) / own for own, start, end in self._taken]
        self._taken.clear()
        samples = len(per_sample)
        seconds = samples * median(per_sample) if samples else 0.0
        room, most = self._room(), None
        if room < math.inf:  # memory grows no faster than the part
            most = int(self._largest_own * max(1.0, room))
        return Pace(samples, seconds, self._shares.drawn, most=most)
