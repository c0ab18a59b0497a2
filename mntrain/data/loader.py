"""Sharding of a user's own data loader: each rank gets its part of every batch.

Each batch of the loader is a global batch:

    loader:   [--- batch ---][--- batch ---]...        the same on every rank
    rank 1:       [---]          [---]                 the rank's contiguous part of each batch

Nothing in this module communicates. The ranks see the same batches because torch's default CPU
generator, from which a loader draws its shuffling, is seeded by (seed, epoch) while it draws.
"""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sized
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from mntrain.data.sampling import mixed_seed
from zero.layout import split

OnShare = Callable[[int | None], None]
Shares = deque[int]


class ShardedLoader:
    """This rank's part of every batch of a loader. Each iteration over it is one epoch. Local.

    A torch DataLoader over a map-style dataset is rebuilt with the same dataset and settings, so
    that each rank loads only its own samples. For any other iterable, every rank makes the whole
    batches and slices its part: tensors, arrays and lists of strings are sliced along the first
    dimension, also within nested tuples, lists, mappings and dataclasses.

    Before it yields a batch, it calls on_share with this rank's number of samples in it; after the
    last batch, or when the loop is left early, it calls on_share(None). If a batch has fewer
    samples than there are ranks, a rank without samples gets the batch's first sample as a
    stand-in, with a share of 0. Weighted by the shares, every sample counts once, and all ranks
    take part in the step. Only state that a forward pass updates, such as running statistics, is
    affected by stand-ins.

    A source of randomness other than torch's default generator, such as a sampler with its own
    generator, must be seeded alike on all ranks by the caller. Raises ValueError for a loader with
    a DistributedSampler, whose batches are sharded already; iterating, for an empty batch.
    """

    epoch: int
    """Epoch of the next iteration. It seeds the shuffling: set it in a resumed job."""

    def __init__(
        self, loader: Iterable[Any], rank: int, size: int, seed: int, on_share: OnShare
    ) -> None:
        if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
            raise ValueError(
                "the loader has a DistributedSampler, so its batches are sharded already: "
                "build it with shuffle=True or another sampler over all samples"
            )
        self.epoch = 0
        self._source, self._rank, self._size, self._seed = loader, rank, size, seed
        self._on_share = on_share
        self._sampler: _ShardSampler | None = None
        # A subclass with its own __iter__ cannot be rebuilt: its batches are sliced instead.
        if (
            isinstance(loader, DataLoader)
            and type(loader).__iter__ is DataLoader.__iter__
            and loader.batch_sampler is not None
            and not isinstance(loader.dataset, IterableDataset)
        ):
            self._sampler = _ShardSampler(loader.batch_sampler, rank, size)
            # Seeds the workers: differently on each rank, independent of training's generator.
            generator = torch.Generator().manual_seed(mixed_seed(seed, rank))
            self._source = _rebuilt(loader, self._sampler, generator)

    def __len__(self) -> int:
        """Return the number of batches of an epoch. Raises TypeError if the loader has no len."""
        return len(cast(Sized, self._source))

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

    def _parts(self, seed: int) -> Iterator[tuple[Any, int]]:
        """Yield this rank's part of each batch, and its number of samples (0 for a stand-in)."""
        if self._sampler is not None:
            # Workers load ahead: each share is queued from sampling until its batch is yielded.
            shares = self._sampler.begin(seed)
            for batch in self._source:
                yield batch, shares.popleft()
            return
        for batch in _seeded(self._source, seed):
            rows, share = _rows(_length(batch), self._rank, self._size)
            yield _map_columns(batch, itemgetter(rows)), share


class _ShardSampler:
    """This rank's part, or stand-in, of each index list of a batch sampler."""

    def __init__(self, batches: Iterable[Iterable[int]], rank: int, size: int) -> None:
        self._batches, self._rank, self._size = batches, rank, size
        self._epoch: tuple[int, Shares] = (0, deque())

    def begin(self, seed: int) -> Shares:
        """Set the seed of the next iteration; return the queue to which it appends its shares."""
        self._epoch = (seed, deque())
        return self._epoch[1]

    def __len__(self) -> int:
        return len(cast(Sized, self._batches))

    def __iter__(self) -> Iterator[list[int]]:
        seed, shares = self._epoch
        for batch in _seeded(self._batches, seed):
            indices = list(batch)
            rows, share = _rows(len(indices), self._rank, self._size)
            shares.append(share)
            yield indices[rows]


def _rebuilt(
    loader: DataLoader[Any], sampler: _ShardSampler, generator: torch.Generator
) -> DataLoader[Any]:
    """Return a loader of the same dataset and settings, with another batch sampler."""
    return DataLoader(
        loader.dataset,
        batch_sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        generator=generator,
    )


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
    state, iterator = torch.Generator().manual_seed(seed).get_state(), None
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            try:
                iterator = iter(source) if iterator is None else iterator
                item = next(iterator)
            except StopIteration:
                return
            state = torch.get_rng_state()
        yield item


def _length(batch: Any) -> int:
    """Return the number of samples of a batch. Raises ValueError unless all columns agree."""
    lengths = set()

    def count(column: Any) -> Any:
        lengths.add(len(column))
        return column

    _map_columns(batch, count)
    if len(lengths) != 1:
        raise ValueError(
            "a batch to slice needs tensors of one length in their first dimension, "
            f"but this {type(batch).__name__} has {sorted(lengths) or 'no tensors'}"
        )
    return lengths.pop()


def _map_columns(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nested batch with all columns changed; other values are passed through.

    A column has one entry a sample: a tensor, an array, a list of strings.
    """
    if isinstance(nest, Tensor | np.ndarray):
        return change(nest) if nest.ndim else nest
    if isinstance(nest, list) and nest and isinstance(nest[0], str | bytes):
        return change(nest)
    if isinstance(nest, Mapping):
        changed = copy.copy(nest) if isinstance(nest, MutableMapping) else {}
        changed.update({key: _map_columns(value, change) for key, value in nest.items()})
        return changed
    if isinstance(nest, tuple | list):
        items = [_map_columns(value, change) for value in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = [field.name for field in dataclasses.fields(nest) if field.init]
        return dataclasses.replace(
            nest, **{name: _map_columns(getattr(nest, name), change) for name in names}
        )
    return nest
