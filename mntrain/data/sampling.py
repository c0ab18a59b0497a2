"""The order of the training samples, and the contiguous share of each rank.

    epoch:    a permutation of the samples, a function of (seed, epoch)
    step:     the next batch_size samples: the global batch   [------------------------]
    rank:     a contiguous share of the global batch          [-------|--------|-------]
              (of equal size, unless `mntrain.balance.shares` says otherwise)
    worker:   micro-batches whose sizes differ by at most 1   [---|---|----|---|---|---]

Every level but unequal shares is a closed form of the step, the rank and the size. The global order
is therefore the same on any number of ranks, and a job resumes by starting at a later step. Nothing
in this module communicates.
"""

import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from mntrain.balance.cadence import Cadence
from mntrain.balance.own_pace import BatchNumber
from mntrain.balance.shares import Shares
from mntrain.data.phase_notes import name_samples, noted
from mntrain.data.randomness import SeededDraws, mixed_seed, permuted, seed_all
from mntrain.data.source import check_workers
from zero.layout import split

_WORKER_GRACE_S = 30  # for which a worker survives a SIGTERM


class Position(NamedTuple):
    """A step and the place of its first sample in the order of all epochs."""

    step: int
    epoch: int
    offset: int  # in the epoch


BEGIN = Position(0, 0, 0)


@dataclass(frozen=True)
class SampleOrder:
    """The order in which a job sees its samples. Pure: all ranks hold an equal one.

    An epoch takes every sample once; its last batch is smaller if batch_size does not divide
    samples, or is left out with `drop_last`. Steps are counted from 0 and continue over the epochs.
    A resumed run continues at `origin`, and the order has only the steps from there on. Raises
    ValueError for a dataset without a sample, or without a batch that is not left out.
    """

    samples: int  # of the dataset
    batch_size: int  # samples of a global batch, that of all ranks together
    seed: int  # of the permutations
    order: Sequence[int] | None = None  # of the samples in every epoch; None: shuffled
    drop_last: bool = False
    origin: Position = BEGIN
    shares: Shares | Cadence | None = None  # None: equal

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError("the dataset has no samples: give at least one")
        if not self.steps_per_epoch:
            raise ValueError(
                f"the dataset has {self.samples} samples, fewer than a batch of {self.batch_size}, "
                "which drop_last (--data.drop-last) leaves out: give a smaller batch size "
                "(--train.batch-size)"
            )

    def at(self, step: int) -> "SampleOrder":
        """Return the order of a step, which is this one."""
        return self

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in one pass over the samples."""
        return self._steps_in(self.samples)

    def steps_until(self, epochs: int) -> int:
        """Return the step of the run after which so many epochs have ended."""
        left = self._steps_in(self.samples - self.origin.offset)  # of the epoch of the origin
        whole = epochs - self.origin.epoch - 1
        return self.origin.step + left + whole * self.steps_per_epoch

    def _steps_in(self, samples: int) -> int:
        """Return the number of steps that so many samples make at the end of an epoch."""
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def position(self, step: int) -> Position:
        """Return where a step begins."""
        epoch, start, _ = self.batch_bounds(step)
        return Position(step, epoch, start)

    def batch(self, step: int, *, keyed: bool = False) -> "GlobalBatch":
        """Return the samples of a step's global batch."""
        return GlobalBatch(self, step, keyed=keyed)

    def share(self, step: int, rank: int, size: int) -> Tensor:
        """Return a rank's share of a step's global batch, new, 1-D int64, possibly empty."""
        return self.samples_at(*self.share_bounds(step, rank, size))

    def micro_batches(
        self, step: int, rank: int, size: int, micro_batch_size: int
    ) -> list[list[int]]:
        """Return a rank's share of a step as the fewest lists of at most micro_batch_size samples.

        Their lengths differ by at most one. The result is empty if the share is.
        """
        return cut_evenly(self.share(step, rank, size).tolist(), micro_batch_size)

    def samples_at(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the samples at [start, stop) of an epoch's order."""
        if self.order is not None:
            return torch.tensor(self.order[start:stop], dtype=torch.int64, device="cpu")
        return torch.from_numpy(permuted(start, stop, self.samples, self.seed, epoch))

    def share_bounds(self, step: int, rank: int, size: int) -> tuple[int, int, int]:
        """Return the step's epoch, and the [start, stop) of a rank's share in the epoch's order."""
        epoch, start, stop = self.batch_bounds(step)
        bounds: Sequence[int] = split(stop - start, size)
        if self.shares is not None:
            bounds = self.shares.bounds(stop - start, BatchNumber(0, step))
        return epoch, start + bounds[rank], start + bounds[rank + 1]

    def batch_bounds(self, step: int) -> tuple[int, int, int]:
        """Return the step's epoch, and the [start, stop) of its batch in the epoch's order."""
        since = step - self.origin.step
        assert since >= 0, "the order begins later"
        epoch, start = self.origin.epoch, self.origin.offset + since * self.batch_size
        left = self._steps_in(self.samples - self.origin.offset)  # of the epoch of the origin
        if since >= left:
            epochs, batch = divmod(since - left, self.steps_per_epoch)
            epoch, start = epoch + 1 + epochs, batch * self.batch_size
        return epoch, start, min(start + self.batch_size, self.samples)


class GlobalBatch(Sequence[Any]):
    """The samples of a global batch, of which a part costs what this part costs, not the whole.

    If it is `keyed`, its items are (step, sample), for a `SeededDataset`. `digest` is that of what
    decides the samples: 16 bits.
    """

    def __init__(self, order: SampleOrder, step: int, *, keyed: bool = False) -> None:
        self._order, self._step, self._keyed = order, step, keyed
        self._epoch, self._start, self._stop = order.batch_bounds(step)

    @property
    def digest(self) -> int:
        """16 bits of the seed and the place of the batch."""
        order, place = self._order, (self._step, self._epoch, self._start, self._stop)
        return zlib.crc32(repr((order.samples, order.seed, place)).encode()) & 0xFFFF

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: Any) -> Any:
        places = range(self._start, self._stop)[index]
        if isinstance(places, int):
            return self._items(places, places + 1)[0]
        if not places:
            return []
        between = self._items(min(places), max(places) + 1)
        return between[:: places.step]

    def _items(self, start: int, stop: int) -> list[Any]:
        samples = self._order.samples_at(self._epoch, start, stop).tolist()
        return [(self._step, sample) for sample in samples] if self._keyed else samples


class CadenceSampling:
    """The order in which a job with a cadence sees its samples, from `origin` on. Local.

        counts:   10, 10 micro-batches             10, 40
        steps:    [ 20 ][ 20 ][ 20 ] ... [ 20 ]    [    50    ][    50    ] ...
        samples:  the order of an epoch, without a gap

    Each order of a cadence is a `SampleOrder` with another batch size, which continues at the
    sample where the one before has ended, as a run does that is resumed with another
    --train.batch-size. With `drop_last` the smaller last batch of an epoch is left out. Every rank
    holds an equal one, and the order of samples is that of any other run.
    """

    def __init__(
        self, cadence: Cadence, samples: int, seed: int, *, drop_last: bool, origin: Position
    ) -> None:
        self._cadence, self.seed = cadence, seed
        size = cadence.samples(0)
        self._orders = [
            SampleOrder(samples, size, seed, drop_last=drop_last, origin=origin, shares=cadence)
        ]

    def at(self, step: int) -> SampleOrder:
        """Return the order of a step, 0 for the first of the run."""
        index = self._cadence.index(BatchNumber(0, step))
        while (number := len(self._orders)) <= index:
            before, size = self._orders[-1], self._cadence.samples(number)
            begin = before.position(self._cadence.revisions[number].first.batch)
            self._orders.append(replace(before, batch_size=size, origin=begin))
        return self._orders[index]


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of one rank's data loading. Raises ValueError as `check_workers`."""

    rank: int
    micro_batch_size: int  # largest number of samples in a micro-batch
    workers: int = 0  # loader processes of this rank; 0: the rank itself loads
    start_method: str = "spawn"  # of the workers: "fork", "forkserver" or "spawn"
    collate: Callable[[list[Any]], Any] | None = None  # None: torch's `default_collate`
    data: str = "training data"  # the name of the data in errors

    def __post_init__(self) -> None:
        check_workers(self.workers)


def cut_evenly(items: list[Any], most: int) -> list[list[Any]]:
    """Return the fewest lists of at most `most` items; their lengths differ by at most one."""
    bounds = split(len(items), -(-len(items) // most)) if items else ()
    return [items[low:high] for low, high in pairwise(bounds)]


class SeededDataset(Dataset[Any]):
    """Lists of collated micro-batches of a dataset, by lists of (step, sample).

    Random draws for a sample depend only on the seed, the step and the sample: augmentation is the
    same with any workers, on any ranks and in a resumed job. This covers the default generators of
    torch, Python and numpy, which are restored after each micro-batch. A dataset with a
    `__getitems__` of its own, which fetches many samples at once, is seeded once per micro-batch:
    its draws depend on the number of ranks. An exception gets a note of the samples.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, options: LoaderOptions) -> None:
        self._dataset, self._seed = dataset, seed
        self._rank, self._data = options.rank, options.data
        self._most = options.micro_batch_size
        self._collate = options.collate or default_collate
        # Subset has one that only calls the dataset's.
        self._fetch = (
            None if isinstance(dataset, Subset) else getattr(dataset, "__getitems__", None)
        )

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        """Return a rank's micro-batches of a step."""
        return [self.micro_batch(part) for part in cut_evenly(keys, self._most)]

    def micro_batch(self, keys: Sequence[tuple[int, int]]) -> Any:
        """Return samples of a step, however many, as one collated micro-batch."""
        step_seed, samples = mixed_seed(self._seed, keys[0][0]), [sample for _, sample in keys]
        with SeededDraws(step_seed + samples[0]):
            if self._fetch is not None:
                with self._noted("loading", samples):
                    loaded = list(self._fetch(samples))
            else:
                loaded = [self._sample(step_seed, sample) for sample in samples]
        with self._noted("collating", samples):
            return self._collate(loaded)

    def _sample(self, step_seed: int, sample: int) -> Any:
        seed_all(step_seed + sample)
        with self._noted("loading", [sample]):
            return self._dataset[sample]

    def _noted(self, phase: str, samples: list[int]) -> AbstractContextManager[None]:
        return noted(self._rank, phase, partial(name_samples, samples, self._data))


class ShuffledBatches:
    """A batch sampler whose every pass takes each sample once, in a new random order.

        DataLoader(dataset, batch_sampler=mntrain.ShuffledBatches(len(dataset), 64))

    As shuffle=True, but no list of all samples is in memory, and none is made when a pass is
    resumed: an order is a closed form (`mntrain.data.randomness.permuted`), of which a rank
    computes its own part. Its seed is drawn from torch's default generator when a pass begins,
    which `World.shard` seeds alike on all ranks. A batch has `batch_size` samples; the last one is
    smaller, or left out with `drop_last`. Raises ValueError for other numbers than whole ones above
    0, and as `SampleOrder`.
    """

    def __init__(self, samples: int, batch_size: int, *, drop_last: bool = False) -> None:
        for name, number in {"samples": samples, "batch_size": batch_size}.items():
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} of ShuffledBatches is {number!r}: give an int above 0")
        self._order = SampleOrder(samples, batch_size, 0, drop_last=drop_last)

    def __iter__(self) -> Iterator[Any]:
        seed = int(torch.randint(1 << 62, ()))
        order = replace(self._order, seed=seed)
        return (order.batch(step) for step in range(len(self)))

    def __len__(self) -> int:
        return self._order.steps_per_epoch


def step_loader(
    dataset: Dataset[Any],
    order: SampleOrder | CadenceSampling,
    options: LoaderOptions,
    steps: range,
) -> DataLoader[Any]:
    """Return a loader of the global batches of some steps, for `World.shard`. Local.

    It is drawn once. A rank's part of a batch is the list of its collated micro-batches. Workers
    load ahead, over steps and epochs. Random draws of the dataset are reproducible
    (`SeededDataset`).
    """
    batches: Iterator[Any] = (order.at(step).batch(step, keyed=True) for step in steps)
    return DataLoader(
        SeededDataset(dataset, order.seed, options),
        batch_sampler=batches,
        num_workers=options.workers,
        multiprocessing_context=options.start_method if options.workers else None,
        collate_fn=as_it_is,
        worker_init_fn=ignore_signals,
    )


def spread(total: int, samples: int) -> Sequence[int]:
    """Return at most `samples` of so many, evenly spread; for 0 all of them."""
    return split(total, samples)[:-1] if 0 < samples < total else range(total)


def as_it_is(batch: Any) -> Any:
    """Return a batch: the `collate_fn` of loaders whose datasets collate."""
    return batch


def ignore_signals(worker: int) -> None:
    """Ignore a scheduler's signals in a worker: the rank receives them too, and reacts.

    A rank also ends an unresponsive worker by SIGTERM: the worker then exits after a delay.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_WORKER_GRACE_S))
