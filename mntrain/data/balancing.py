"""Comparison of the ranks' paces: slow ranks are named, and their parts of batches revised."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from mntrain.balance.cadence import Cadence
from mntrain.balance.own_pace import INTERVAL, BatchNumber, OwnPace
from mntrain.balance.shares import Shares
from mntrain.balance.stragglers import Straggler, Stragglers
from mntrain.ranks import Ranks


class Balancing:
    """Collects the ranks' paces every few batches, names slow ranks, and revises the division.

    `ranks` is the world or a weak proxy of it. The user is warned of a slow rank, with `advice`,
    and told of one that has recovered, and of revisions, unless these begin after `last_step`.
    `batch` is the word for a batch.
    """

    def __init__(
        self,
        ranks: Ranks,
        division: Shares | Cadence | None,
        own: OwnPace,
        *,
        advice: str = "",
        last_step: int = 0,
        batch: str = "step",
    ) -> None:
        self.division = division
        self._ranks, self._advice = ranks, advice
        self._last_step, self._own, self._batch = last_step, own, batch
        self._stragglers = Stragglers(ranks.size)
        # The latest batch after which ranks could compare their paces; None before the first.
        self._compared: int | None = None

    def compare(
        self, step: int, passes: int = 0, most: Callable[[], int | None] = lambda: None
    ) -> None:
        """Exchange paces, if that is due after this step, which all ranks have taken. Collective.

        It is after each multiple of `INTERVAL` steps, or in the first call after one. Waits for
        the device. Raises RuntimeError on all ranks if they are not at the same batch of so many
        `passes`. `most` returns the samples of a batch that fit into this rank's memory.
        """
        before = step - 1 if self._compared is None else self._compared
        self._compared = step
        if self._ranks.size == 1 or step // INTERVAL == before // INTERVAL:
            return
        place, division = (passes, step), self.division
        pace = self._own.take(division.drawn if division else BatchNumber(0, 0), most())
        gathered = self._ranks.gather((place, pace))
        if any(other != place for other, _ in gathered):
            places = ", ".join(f"rank {r}: pass {p}" for r, ((p, _), _) in enumerate(gathered))
            raise RuntimeError(
                f"ranks have begun other passes over world.shard(balance=True) ({places}): iterate "
                "over it equally often on all ranks; to look at a batch, use the loader itself"
            )
        paces = [pace for _, pace in gathered]
        for straggler in self._stragglers.update(step, paces):
            self._report(straggler)
        revision = division.revise(paces) if division else None
        if division and revision and revision.first.batch < self._last_step:
            self._tell(f"balance: from step {revision.first.batch + 1}, {division.describe()}")

    def _tell(self, text: str) -> None:
        self._ranks.output.note(text)

    def _report(self, straggler: Straggler) -> None:
        name = f"rank {straggler.rank} on {self._ranks.places[straggler.rank].host}"
        if straggler.until is not None:
            self._tell(f"{name} is no longer slow after {self._batch} {straggler.until}")
            return
        phase = f", mostly in {straggler.phase}" if straggler.phase else ""
        self._ranks.output.warn(
            f"since {self._batch} {straggler.since}, {name} takes {straggler.ratio:.1f} times as "
            f"long for a sample as the other ranks (median){phase}{self._advice}"
        )


class StepBalancing(Balancing):
    """Balancing of a job, whose batches are its steps. Own time is that from `begin` to `end`.

    All ranks wait for each other `every` few steps.
    """

    def __init__(
        self, ranks: Ranks, division: Shares | Cadence | None, *, every: int = 1, **options: Any
    ) -> None:
        super().__init__(ranks, division, OwnPace(ranks.waits), **options)
        self._rarest = max(INTERVAL, every)

    def begin(self) -> None:
        """Begin to load and compute a step. Local."""
        self._own.begin()

    def end(self, samples: int, times: Mapping[str, float]) -> None:
        """Note what this rank has computed in a step, and its seconds by phase. Local.

        Does not wait for a device.
        """
        host, rest = {"data": times["data"], "backward": times["backward"]}, "forward"
        if self._ranks.device.type == "cuda":  # computes behind its host
            host, rest = {"data": times["data"]}, "forward and backward"
        self._own.end(samples, host, rest)

    def after_reduction(self, step: int) -> None:
        """Note that all ranks have the result of this step, and `compare`. Collective."""
        self._own.reduced()
        self.compare(step)

    def slow_ranks(self, step: int) -> dict[str, float]:
        """Return the ratio of each rank that is slow, by "rank/phase": see `Straggler`. Local.

        None of them in steps in which ranks no longer compare their paces.
        """
        if self._compared is None or step > self._compared + self._rarest:
            return {}
        slow = (straggler for straggler in self._stragglers.found if straggler.until is None)
        return {f"{one.rank}/{one.phase}": round(one.ratio, 2) for one in slow}

    def figures(self) -> dict[str, float]:
        """Return the samples of this rank so far, and its own seconds. Waits for the device."""
        self._own.count_pending()
        return {"samples": self._own.samples, "own_s": self._own.seconds}

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json: slow ranks, and the revisions of parts. Local."""
        found = self._stragglers.found
        entries: dict[str, Any] = {"stragglers": [asdict(straggler) for straggler in found]}
        if division := self.division:
            begun = (
                revision
                for revision in division.revisions
                if revision.first.batch < self._last_step
            )
            entries[division.name] = [
                entry for revision in begun if (entry := division.entry(revision))
            ]
        return entries


class LoaderBalancing(Balancing):
    """Balancing of training passes over the loaders of a dataset, or of several in turn.

    Own time is that from one request for a batch to the next, by the median batch, since between
    some of them a loop evaluates or saves.
    """

    division: Shares

    def __init__(self, ranks: Ranks) -> None:
        own = OwnPace(ranks.waits, robust=True)
        super().__init__(ranks, Shares(ranks.size, 0), own, batch="batch")
        self._passes = 0
        self._handed_over = 0  # passes, when another dataset last took over
        self._largest_own: int | None = None  # samples of this rank's part of a batch

    def _tell(self, text: str) -> None:
        self._ranks.output.warn(text)

    def begin_pass(self) -> int:
        """Begin a training pass, and return its number, which is the same on all ranks. Local."""
        self._passes += 1
        self._own.begin()
        return self._passes

    def hand_over(self) -> bool:
        """Return True if the next dataset may go on with these paces, once after a pass. Local.

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

        Called when the next one is asked for.
        """
        self._own.end(own)
        self.division.samples = max(self.division.samples, total)  # an epoch's last may be small
        self._largest_own = max(self._largest_own or 0, own)
        self.compare((self._compared or 0) + 1, self._passes, self._most)
        self._own.begin()

    def _most(self) -> int | None:
        """Return the samples of a batch that fit into memory, which grows no faster than a part."""
        if self._largest_own is None or (room := self._ranks.memory_room()) == math.inf:
            return None
        return int(self._largest_own * max(1.0, room))
