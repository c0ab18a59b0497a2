"""Sharding of a user's own data loader: each rank gets its part of every batch.

Each batch of the loader is a global batch:

    loader:   [--- batch ---][--- batch ---]...        the same on every rank
    rank 1:       [---]          [---]                 the rank's contiguous part of each batch

Nothing in this module communicates. The ranks see the same batches because torch's default CPU
generator, from which a loader draws its shuffling, is seeded by (seed, epoch) while it draws.
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

from mntrain.data.sampling import mixed_seed
from zero.layout import split

OnShare = Callable[[int | None], None]


def shard(
    loader: Iterable[Any], rank: int, size: int, seed: int, on_share: OnShare
) -> "ShardedLoader":
    """Return an iterable over this rank's part of each batch of a loader. Local.

    A torch DataLoader over a map-style dataset is rebuilt with the same dataset and settings, so
    that each rank loads only its own samples. For any other iterable, every rank makes the whole
    batches and slices its part: tensors, arrays and lists of strings are sliced along the first
    dimension, also within nested tuples, lists, mappings and dataclasses.

    A source of randomness other than torch's default generator, such as a sampler with its own
    generator, must be seeded alike on all ranks by the caller. Raises ValueError for a loader with
    a DistributedSampler, whose batches are sharded already.
    """
    if not isinstance(loader, DataLoader):
        return SlicingLoader(loader, rank, size, seed, on_share)
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            "the loader has a DistributedSampler, so its batches are sharded already: "
            "build it with shuffle=True or another sampler over all samples"
        )
    # A subclass with its own __iter__ cannot be rebuilt: its batches are sliced instead.
    iterates_by_index = (
        type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )
    kind = SamplingLoader if iterates_by_index else SlicingLoader
    return kind(loader, rank, size, seed, on_share)


class ShardedLoader(ABC):
    """This rank's part of every batch of a loader. Each iteration over it is one epoch.

    Before it yields a batch, it calls on_share with this rank's number of samples in it; after the
    last batch, or when the loop is left early, it calls on_share(None). If a batch has fewer
    samples than there are ranks, a rank without samples gets the batch's first sample as a
    stand-in, with a share of 0. Weighted by the shares, every sample counts once, and all ranks
    take part in the step. Only state that a forward pass updates, such as running statistics, is
    affected by stand-ins.

    Iterating raises ValueError for an empty batch.
    """

    epoch: int
    """Epoch of the next iteration. It seeds the shuffling: set it in a resumed job."""

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
        """Return the number of batches of an epoch. Raises TypeError if the loader has no len."""
        return len(cast(Sized, self._loader))

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        # An evaluation (without gradients) between a batch and its backward must not replace that
        # batch's share.
        training = torch.is_grad_enabled()
        try:
            for batch, share in self._parts(mixed_seed(self._seed, epoch)):
                if training:
                    self._on_share(share)
                yield batch
        finally:
            if training:
                self._on_share(None)

    @abstractmethod
    def _parts(self, seed: int) -> Iterator[tuple[Any, int]]:
        """Yield this rank's part of each batch, and its number of samples (0 for a stand-in)."""


class SlicingLoader(ShardedLoader):
    """Sharding of any iterable: makes whole batches, then slices this rank's part."""

    def _parts(self, seed: int) -> Iterator[tuple[Any, int]]:
        for batch in _seeded(self._loader, seed):
            lengths = set(_lengths(batch))
            if len(lengths) != 1:
                raise ValueError(
                    "a batch to slice needs tensors of one length in their first dimension, "
                    f"but this {type(batch).__name__} has {sorted(lengths) or 'no tensors'}"
                )
            rows, share = _rows(lengths.pop(), self._rank, self._size)
            yield _sliced(batch, rows), share


class SamplingLoader(ShardedLoader):
    """Sharding of a DataLoader: the same loader with a sampler of this rank's samples only."""

    def __init__(
        self, loader: DataLoader[Any], rank: int, size: int, seed: int, on_share: OnShare
    ) -> None:
        assert loader.batch_sampler is not None
        self._sampler = _ShardSampler(loader.batch_sampler, rank, size)
        sharded = DataLoader(
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
            # Seeds the workers: differently on each rank, independent of training's generator.
            generator=torch.Generator().manual_seed(mixed_seed(seed, rank)),
        )
        super().__init__(sharded, rank, size, seed, on_share)

    def _parts(self, seed: int) -> Iterator[tuple[Any, int]]:
        # Workers load ahead: each share is queued from sampling until its batch is yielded.
        shares: deque[int] = deque()
        self._sampler.begin(seed, shares)
        for batch in self._loader:
            yield batch, shares.popleft()


class _ShardSampler(Sampler[list[int]]):
    """This rank's part, or stand-in, of each index list of a batch sampler."""

    def __init__(self, batches: Iterable[Iterable[int]], rank: int, size: int) -> None:
        self._batches = batches
        self._rank = rank
        self._size = size
        self._epoch: tuple[int, deque[int]] = (0, deque())

    def begin(self, seed: int, shares: deque[int]) -> None:
        """Set the seed of the next iteration, and the queue to append its shares to."""
        self._epoch = (seed, shares)

    def __len__(self) -> int:
        return len(cast(Sized, self._batches))

    def __iter__(self) -> Iterator[list[int]]:
        seed, shares = self._epoch
        for batch in _seeded(self._batches, seed):
            indices = list(batch)
            rows, share = _rows(len(indices), self._rank, self._size)
            shares.append(share)
            yield indices[rows]


def _rows(samples: int, rank: int, size: int) -> tuple[slice, int]:
    """Return a rank's rows of a batch, or the stand-in's, and the rank's number of samples."""
    if samples == 0:
        raise ValueError("the loader made a batch of no samples: leave it out")
    start, stop = split(samples, size)[rank : rank + 2]
    return (slice(start, stop), stop - start) if start < stop else (slice(0, 1), 0)


def _seeded(source: Iterable[Any], seed: int) -> Iterator[Any]:
    """Iterate over a source, with torch's default CPU generator seeded while the source draws.

    Between items the generator has the caller's state.
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
    """Return True for a value with one entry a sample: a tensor, an array, a list of strings."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    return isinstance(value, list) and bool(value) and isinstance(value[0], str | bytes)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _lengths(nest: Any) -> Iterator[int]:
    """Yield the length of every column in a nested batch."""
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


def _sliced(nest: Any, rows: slice) -> Any:
    """Return a nested batch with all columns sliced; other values are passed through."""
    if _is_column(nest):
        return nest[rows]
    if isinstance(nest, MutableMapping):
        sliced = copy.copy(nest)
        sliced.update({key: _sliced(value, rows) for key, value in nest.items()})
        return sliced
    if isinstance(nest, Mapping):
        return {key: _sliced(value, rows) for key, value in nest.items()}
    if isinstance(nest, tuple | list):
        values = [_sliced(value, rows) for value in nest]
        return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)
    if _is_dataclass(nest):
        fields = [field.name for field in dataclasses.fields(nest) if field.init]
        return dataclasses.replace(nest, **{f: _sliced(getattr(nest, f), rows) for f in fields})
    return nest
