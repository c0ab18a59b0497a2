"""The sharded loaders of a world."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol
from weakref import WeakValueDictionary

from torch.utils.data import Dataset, IterableDataset

from mntrain.data.first_batch import FirstBatch
from mntrain.data.loader import ByOwner, Comparison, PassesByDataset, ShardedLoader
from mntrain.data.loader_balance import LoaderBalance, OwnClock
from mntrain.data.source import PassRecord, ShardContext
from zero.gradients.weights import BatchSource
from zero.optimizer import ZeroOptimizer


class LoaderRanks(Protocol):
    """The ranks of a job as its loaders see them: a `mntrain.world.World`."""

    rank: int
    size: int

    @property
    def waits(self) -> OwnClock:
        """The clock of this rank, which stands still while it waits for others."""

    def memory_room(self) -> float:
        """Return the factor by which this rank's largest need of memory may grow. Local."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's object, by rank. Collective."""


class ShardRegistry:
    """Makes the shards of a world, whose `optimizers` learn of the batches. Local.

    `ranks` may be a weak proxy of the world. Its methods are looked up when they are called: a
    bound one would keep the world alive. Collective are `compare`, which raises an error on all
    ranks if their loaders differ, and `length_of_divided`, which returns the number of batches of
    the longest of the ranks' own loaders.
    """

    def __init__(
        self,
        ranks: LoaderRanks,
        optimizers: Sequence[ZeroOptimizer],
        compare: Callable[[LoaderRanks, FirstBatch], None],
        length_of_divided: Callable[[LoaderRanks, Iterable[Any]], int | None],
    ) -> None:
        self._ranks, self._optimizers = ranks, optimizers
        self._compare_first, self._length_of_divided = compare, length_of_divided
        self.latest: PassRecord | None = None  # of the pass from which a batch was drawn last
        self._passes = PassesByDataset()
        self._comparisons = ByOwner(lambda: Comparison(always=False))
        # The batch of a pass in progress.
        self._batch: tuple[float, int | None, BatchSource] | None = None
        self._balances: list[LoaderBalance] = []
        # While it lives, a shard is that of each call with the same arguments; it keeps its loader.
        self._shards: WeakValueDictionary[Any, ShardedLoader] = WeakValueDictionary()

    def shard(
        self,
        loader: Iterable[Any],
        seed: int,
        weight: Callable[[Any], float] | None,
        lists: Literal["samples", "columns"] | None,
        *,
        balance: bool,
        divided: bool,
    ) -> ShardedLoader:
        """Return the shard of a loader. See `World.shard`."""
        if isinstance(loader, Dataset) or not isinstance(loader, Iterable):
            raise ValueError(
                f"loader is of type {type(loader).__name__}: give a torch DataLoader, or another "
                "iterable of global batches"
            )
        if not isinstance(balance, bool):
            raise ValueError(
                f"balance={balance!r}: give True or False; a cadence is of training jobs alone "
                "(--balance.mode cadence), since a loop of one's own decides when to step"
            )
        if balance and divided:
            raise ValueError(
                "divided=True with balance=True: each rank's loader decides what the rank gets; "
                "leave one of the two out"
            )
        if balance and isinstance(getattr(loader, "dataset", None), IterableDataset):
            raise ValueError(
                "balance=True: the samples of an IterableDataset are divided equally; give a "
                "loader of a dataset with __len__ and __getitem__, or leave it out"
            )
        batches = self._length_of_divided(self._ranks, loader) if divided else None
        key = id(loader), seed, id(weight), lists, balance, divided
        shard = self._shards.get(key)
        if shard is None:
            passes = self._passes.of(loader)
            size = self._ranks.size
            if balance and size > 1 and passes.balance is None:
                passes.balance = self._next_balance()
            context = ShardContext(
                self._ranks.rank,
                size,
                self._gather,
                self._expect,
                self._forget,
                passes.balance if balance else None,
                self._compare if size > 1 else None,
                self._note,
            )
            shard = ShardedLoader(
                loader,
                context,
                passes,
                seed=seed,
                weight=weight,
                lists=lists,
                comparison=self._comparisons.of(loader),
                divided=divided,
                batches=batches,
            )
            self._shards[key] = shard
        return shard

    def _next_balance(self) -> LoaderBalance:
        """Return the balance of a new dataset: that of one whose pass has ended, or a new one.

        An epoch may have a dataset of its own, too short to measure speeds in it.
        """
        known = next((one for one in self._balances if one.hand_over()), None)
        if known is None:
            ranks = self._ranks
            known = LoaderBalance(
                ranks.size, self._gather, ranks.waits, self._memory_room, self._check_schedules
            )
            self._balances.append(known)
        return known

    def _compare(self, first: FirstBatch) -> None:
        self._compare_first(self._ranks, first)

    def _note(self, record: PassRecord) -> None:
        self.latest = record

    def tell(self, optimizer: ZeroOptimizer) -> None:
        """Tell an optimizer that was just made of the batch that was drawn before. Local."""
        if self._batch is not None:
            optimizer.assume_batch(*self._batch)

    def _gather(self, value: Any) -> list[Any]:
        return self._ranks.gather(value)

    def _memory_room(self) -> float:
        return self._ranks.memory_room()

    def _expect(
        self, own: float, total: int | None, digest: int | None, source: BatchSource
    ) -> None:
        self._batch = own, total, source
        for optimizer in self._open():
            optimizer.expect_batch(own, total, digest, source)

    def _check_schedules(self) -> None:
        """Raise ValueError for an optimizer whose nodes cannot have unequal numbers of samples."""
        schedules = (one.schedule for one in self._open())
        rare = [schedule for schedule in schedules if schedule.replicas > 1]
        if not all(schedule.weighted for schedule in rare):
            raise ValueError(
                "balance=True with an optimizer that has sync=: each node counts the same in an "
                "exchange, whatever its samples; add weighted=True to its description, such as "
                "LocalSGD(every=50, weighted=True)"
            )
        if any(schedule.independent(sys.maxsize) for schedule in rare):
            raise ValueError(
                "balance=True with an optimizer that has max_staleness: its nodes do not wait for "
                "each other, and to compare speeds ranks do; leave one of the two out"
            )

    def _forget(self, drawn: bool) -> None:
        self._batch = None
        for optimizer in self._open():
            optimizer.forget_batches(drawn=drawn)

    def _open(self) -> Iterator[ZeroOptimizer]:
        return (optimizer for optimizer in self._optimizers if not optimizer.closed)
