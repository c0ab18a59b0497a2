"""The sharded loaders of a world."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal
from weakref import WeakValueDictionary

from torch.utils.data import Dataset, IterableDataset

from mntrain.data.loader import PassesByDataset, ShardedLoader
from mntrain.data.loader_balance import LoaderBalance
from mntrain.data.source import ShardContext
from zero.optimizer import ZeroOptimizer
from zero.step_weights import BatchSource


class ShardRegistry:
    """Makes the shards of a world, whose `optimizers` learn of the batches. Local."""

    def __init__(
        self,
        rank: int,
        size: int,
        gather: Callable[..., Any],
        waited_s: Callable[[], float],
        optimizers: Sequence[ZeroOptimizer],
    ) -> None:
        self._rank, self._size, self._gather, self._optimizers = rank, size, gather, optimizers
        self._waited_s = waited_s
        self._passes = PassesByDataset()
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
    ) -> ShardedLoader:
        """Return the shard of a loader. See `World.shard`."""
        if isinstance(loader, Dataset) or not isinstance(loader, Iterable):
            raise ValueError(
                f"loader is of type {type(loader).__name__}: give a torch DataLoader, or another "
                "iterable of global batches"
            )
        if balance and isinstance(getattr(loader, "dataset", None), IterableDataset):
            raise ValueError(
                "balance=True: the samples of an IterableDataset are divided equally; give a "
                "loader of a dataset with __len__ and __getitem__, or leave it out"
            )
        key = id(loader), seed, id(weight), lists, balance
        shard = self._shards.get(key)
        if shard is None:
            passes = self._passes.of(loader)
            if balance and self._size > 1 and passes.balance is None:
                clocks = self._gather, self._waited_s
                passes.balance = LoaderBalance(self._size, *clocks, self._expect_synchronous)
            context = ShardContext(
                self._rank,
                self._size,
                self._gather,
                self._expect,
                self._forget,
                passes.balance if balance else None,
            )
            shard = ShardedLoader(loader, context, passes, seed=seed, weight=weight, lists=lists)
            self._shards[key] = shard
        return shard

    def _expect(self, own: float, total: int, digest: int | None, source: BatchSource) -> None:
        for optimizer in self._optimizers:
            optimizer.expect_batch(own, total, digest, source)

    def _expect_synchronous(self) -> None:
        """Raise ValueError if an optimizer does not average every step over all ranks."""
        if any(optimizer.schedule.replicas > 1 for optimizer in self._optimizers):
            raise ValueError(
                "balance=True with an optimizer that has sync=: each node counts the same in an "
                "exchange, whatever its samples; leave one of the two out"
            )

    def _forget(self, drawn: bool) -> None:
        for optimizer in self._optimizers:
            optimizer.forget_batches(drawn=drawn)
