"""A rank's part of a loader's batches, for training loops of the user's own.

Each batch of the loader is a global batch:

    loader:   [--- batch ---][--- batch ---]...        the same on every rank
    rank 1:       [---]          [---]                 of each, its contiguous part

Nothing here communicates. The ranks agree on the batches because whatever the loader draws
from torch's default generator on the CPU, to shuffle for instance, it draws from (seed, epoch).
"""

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from mntrain.data.sampling import mixed_seed, part

OnShare = Callable[[int | None], None]


def shard(
    loader: Iterable[Any], rank: int, size: int, seed: int, on_share: OnShare
) -> "ShardedLoader":
    """Return this rank's part of a loader of global batches. Local.

    A torch DataLoader over a map-style dataset is built anew with its dataset and settings, so
    that a rank loads its own samples only. Of any other iterable every rank makes the whole
    batches, and each is cut along the first dimension of the tensors in it (or arrays, or lists
    of strings), which may be nested in tuples, lists, mappings and dataclasses.

    What draws from elsewhere than torch's default generator, such as a sampler with a generator
    of its own, must be seeded alike on all ranks by whoever made it. Raises ValueError for a
    loader that a DistributedSampler has cut already.
    """
    if not isinstance(loader, DataLoader):
        return SlicingLoader(loader, rank, size, seed, on_share)
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            "the loader has a DistributedSampler, which leaves each rank a part already: "
            "build it with shuffle=True or another sampler over all samples"
        )
    # A subclass that iterates in its own way is taken at its word, and its batches are cut.
    iterates_by_index = (
        type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )
    kind = SamplingLoader if iterates_by_index else SlicingLoader
    return kind(loader, rank, size, seed, on_share)


class ShardedLoader(ABC):
    """This rank's part of every batch of a loader. Each iteration over it is one epoch.

    Before a batch is handed out, on_share gets this rank's number of samples in it; after the
    last one, or when the loop is left early, it gets None. A batch of fewer samples than ranks
    leaves some rank with none: it gets one of the batch's samples as a stand-in, and its
    on_share gets 0. Weighed by that, every sample counts once, and the rank still takes part in
    the step; only what a forward pass leaves in the model, such as running statistics, sees the
    stand-in.

    Iterating raises ValueError for a batch with no samples.
    """

    epoch: int
    """The next iteration's; the draws are seeded by it, so a resumed job sets it."""

    def __init__(
        self, loader: Iterable[Any], rank: int, size: int, seed: int, on_share: OnShare
    ) -> None:
        self.epoch = 0
        self._loader = loader
        self._rank = rank
        self._size = size
        self._seed = seed
        self._on_share = on_share

    def __len__(self) -> int:
        """Return the batches of an epoch. Raises TypeError when the loader does not know."""
        return len(cast(Sized, self._loader))

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        # Without gradients nobody trains on it: an evaluation between a batch and its backward must
        # not take that batch's share away.
        trains = torch.is_grad_enabled()
        try:
            for batch, share in self._parts(mixed_seed(self._seed, epoch)):
                if trains:
                    self._on_share(share)
                yield batch
        finally:
            if trains:
                self._on_share(None)

    @abstractmethod
    def _parts(self, seed: int) -> Iterator[tuple[Any, int]]:
        """Yield what to hand out of each batch, and this rank's number of samples in it."""


class SlicingLoader(ShardedLoader):
    """Makes every batch whole, then cuts this rank's part out."""

    def _parts(self, seed: int) -> Iterator[tuple[Any, int]]:
        for batch in _seeded(self._loader, seed):
            lengths = set(_lengths(batch))
            if len(lengths) != 1:
                raise ValueError(
                    "a batch to cut needs tensors of one length in their first dimension, "
                    f"but this {type(batch).__name__} has {sorted(lengths) or 'no tensors'}"
                )
            start, stop, share = _part_or_stand_in(lengths.pop(), self._rank, self._size)
            yield _cut(batch, slice(start, stop)), share


class SamplingLoader(ShardedLoader):
    """Loads this rank's samples only: the same DataLoader behind a sampler of its part."""

    def __init__(
        self, loader: DataLoader[Any], rank: int, size: int, seed: int, on_share: OnShare
    ) -> None:
        assert loader.batch_sampler is not None
        self._sampler = _PartSampler(loader.batch_sampler, rank, size)
        own = DataLoader(
            loader.dataset,
            batch_sampler=self._sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            # Seeds the workers: differently on each rank, and not from training's random state.
            generator=torch.Generator().manual_seed(mixed_seed(seed, rank)),
        )
        super().__init__(own, rank, size, seed, on_share)

    def _parts(self, seed: int) -> Iterator[tuple[Any, int]]:
        # Workers run ahead: a share waits here from the drawing of its batch until it is yielded.
        shares: deque[int] = deque()
        self._sampler.begin(seed, shares)
        for batch in self._loader:
            yield batch, shares.popleft()


class _PartSampler(Sampler[list[int]]):
    """This rank's part, or stand-in, of each list of indices of a batch sampler."""

    def __init__(self, batches: Iterable[Iterable[int]], rank: int, size: int) -> None:
        self._batches = batches
        self._rank = rank
        self._size = size
        self._epoch: tuple[int, deque[int]] = (0, deque())

    def begin(self, seed: int, shares: deque[int]) -> None:
        """Set the next iteration's seed, and the queue that takes its shares."""
        self._epoch = (seed, shares)

    def __len__(self) -> int:
        return len(cast(Sized, self._batches))

    def __iter__(self) -> Iterator[list[int]]:
        seed, shares = self._epoch
        for batch in _seeded(self._batches, seed):
            indices = list(batch)
            start, stop, share = _part_or_stand_in(len(indices), self._rank, self._size)
            shares.append(share)
            yield indices[start:stop]


def _part_or_stand_in(n: int, rank: int, size: int) -> tuple[int, int, int]:
    """Return the bounds of a rank's samples in a batch of n, and how many of them are its own."""
    if n == 0:
        raise ValueError("the loader made a batch of no samples: leave it out")
    start, stop = part(n, rank, size)
    return (start, stop, stop - start) if start < stop else (0, 1, 0)


def _seeded(source: Iterable[Any], seed: int) -> Iterator[Any]:
    """Iterate over a source which sees torch's default generator, on the CPU, start at `seed`.

    Only the draws see it: between them the generator is as the caller left it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        iterator = iter(source)
        state = torch.get_rng_state()
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            try:
                item = next(iterator)
            except StopIteration:
                return
            state = torch.get_rng_state()
        yield item


def _is_column(value: Any) -> bool:
    """Tell whether a value holds one entry a sample: a tensor, an array, a list of strings."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    return isinstance(value, list) and bool(value) and isinstance(value[0], str | bytes)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _lengths(nest: Any) -> Iterator[int]:
    """Yield the length of every column in a nest."""
    if _is_column(nest):
        yield len(nest)
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from _lengths(value)
    elif isinstance(nest, tuple | list):
        for value in nest:
            yield from _lengths(value)
    elif _is_dataclass(nest):
        for field in dataclasses.fields(nest):
            yield from _lengths(getattr(nest, field.name))


def _cut(nest: Any, rows: slice) -> Any:
    """Return the nest with the rows of its columns; whatever is no column stays as it is."""
    if _is_column(nest):
        return nest[rows]
    if isinstance(nest, MutableMapping):
        cut = copy.copy(nest)
        cut.update({key: _cut(value, rows) for key, value in nest.items()})
        return cut
    if isinstance(nest, Mapping):
        return {key: _cut(value, rows) for key, value in nest.items()}
    if isinstance(nest, tuple | list):
        parts = [_cut(value, rows) for value in nest]
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
    if _is_dataclass(nest):
        fields = [field.name for field in dataclasses.fields(nest) if field.init]
        return dataclasses.replace(nest, **{f: _cut(getattr(nest, f), rows) for f in fields})
    return nest
