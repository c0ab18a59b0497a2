"""Shares of a loader's batches in proportion to how fast ranks of a loop of one's own compute."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from mntrain.balance.own_pace import INTERVAL, BatchNumber, OwnClock, OwnPace
from mntrain.balance.shares import Shares


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
        self._shares = Shares(size, 0)
        self._own = OwnPace(clock, robust=True)
        self._gather, self._room, self._check = gather, room, check
        self._passes, self._batches = 0, 0
        self._handed_over = 0  # passes, when another dataset last took over
        self._largest_own = 0  # samples of this rank's part of a batch

    def bounds(self, samples: int, batch: BatchNumber) -> Sequence[int]:
        """Return the bounds of the ranks' parts of a batch. Local."""
        return self._shares.bounds(samples, batch)

    def plan(self, batch: BatchNumber) -> int:
        """Return the number of revisions before a batch. Local."""
        return self._shares.index(batch)

    def begin_pass(self) -> int:
        """Begin a training pass, and return its number, which is the same on all ranks. Local."""
        self._check()
        self._passes += 1
        self._own.begin()
        return self._passes

    def hand_over(self) -> bool:
        """Return True if the next dataset may go on with these speeds, once after a pass. Local.

        Not while a pass is under way: two loaders at a time need clocks of their own.
        """
        free = not self._own.running and self._passes > self._handed_over
        if free:
            self._handed_over = self._passes
        return free

    def end_pass(self, number: int) -> None:
        """End a training pass, unless another one has begun. Local; waits for no device.

        No mark outlives it: a clock keeps what follows its marks.
        """
        if number == self._passes:
            self._own.drop()

    def batch_done(self, own: int, total: int) -> None:
        """Count a batch, of which this rank had `own` samples of `total`. Collective.

        Called when the next one is asked for. Every few batches, ranks exchange their speeds; this
        waits for a GPU.
        Raises RuntimeError on all ranks if they have begun other passes or taken other batches.
        """
        self._own.end(own)
        self._own.begin()
        self._batches += 1
        self._shares.samples = max(self._shares.samples, total)  # an epoch's last may be small
        self._largest_own = max(self._largest_own, own)
        if self._batches % INTERVAL:
            return
        place = self._passes, self._batches
        room, most = self._room(), None
        if room < math.inf:  # memory grows no faster than the part
            most = int(self._largest_own * max(1.0, room))
        gathered = self._gather((place, self._own.take(self._shares.drawn, most)))
        if any(other != place for other, _ in gathered):
            places = ", ".join(f"rank {r}: pass {p}" for r, ((p, _), _) in enumerate(gathered))
            raise RuntimeError(
                f"ranks have begun other passes over world.shard(balance=True) ({places}): iterate "
                "over it equally often on all ranks; to look at a batch, use the loader itself"
            )
        self._shares.revise([pace for _, pace in gathered])
        self._own.begin()
