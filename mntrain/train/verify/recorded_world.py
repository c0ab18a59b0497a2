"""A world whose optimizers are recorded, and whose loaders show their last batch early."""

import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.utils.data import BatchSampler, IterableDataset

from mntrain.data.source import is_plain, rebuilt
from mntrain.world import World
from zero.optimizer import ZeroOptimizer


class StepsOfRun(Protocol):
    """The record of a run, as its world sees it."""

    batch_norms: set[str]

    def making(self) -> AbstractContextManager[None]:
        """Return a context that encloses the making of an optimizer."""

    def watch(self, optimizer: ZeroOptimizer) -> None:
        """Record the steps of an optimizer. Local."""


class RecordedWorld(World):
    """A world that a loop is verified in.

    The second batch of a DataLoader is as short as the last one of its epoch, which few steps do
    not reach. With an `order` other than 0, the samples of each batch are in another order.
    """

    recorded: StepsOfRun
    order = 0

    def optimizer(self, *args: Any, **options: Any) -> ZeroOptimizer:
        """Return a distributed optimizer, as `World.optimizer`, whose steps are recorded."""
        with self.recorded.making():
            made = super().optimizer(*args, **options)
        self.recorded.watch(made)
        return made

    def shard(self, loader: Iterable[Any], *args: Any, **options: Any) -> Any:
        """Return the shard of a loader, as `World.shard`."""
        if (
            not is_plain(loader)
            or isinstance(loader.dataset, IterableDataset)
            or loader.batch_sampler is None
        ):
            return super().shard(loader, *args, **options)
        changed = self.__dict__.setdefault("_changed", {})
        key = id(loader), self.order
        if key not in changed:  # the same loader in each epoch
            batches = _Batches(loader.batch_sampler, self.order)
            changed[key] = loader, rebuilt(loader, batch_sampler=batches)
        return super().shard(changed[key][1], *args, **options)


class _Batches:
    """A batch sampler with the batches of another one, the second as short as its last."""

    def __init__(self, batches: Any, order: int) -> None:
        self._batches, self._order, self._draws = batches, order, random.Random(order)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        last = _last_batch(self._batches)
        for number, given in enumerate(self._batches):
            batch = list(given)
            if number == 1 and last:
                batch = batch[:last]
            yield self._draws.sample(batch, len(batch)) if self._order else batch


def _last_batch(batches: Any) -> int:
    """Return the number of samples of a last batch that is shorter than others; 0 if not known."""
    if type(batches) is not BatchSampler or batches.drop_last:
        return 0
    try:
        return len(batches.sampler) % batches.batch_size  # type: ignore[arg-type]
    except TypeError:  # of a sampler without an end
        return 0
