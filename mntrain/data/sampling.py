"""Which samples are whose: the order of training's samples, and every rank's part of it.

    epoch:    a permutation of the samples, from (seed, epoch) alone
    step:     the next batch_size of it: the global batch     [------------------------]
    rank:     a contiguous part of that                       [-------|--------|-------]
    worker:   micro-batches of nearly equal sizes             [---|---|----|---|---|---]

Everything follows from the step, the rank and the size by closed forms. So the global order is
the same at any number of ranks, and a job resumes by starting at another step. The random numbers
that a dataset draws for a sample follow from the seed, the step and the sample.

Nothing here communicates.
"""

import functools
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

_OUTLAST_S = 30

Collate = Callable[[list[Any]], Any] | None


def part(n: int, index: int, parts: int) -> tuple[int, int]:
    """Return the bounds [start, stop) of one of `parts` contiguous parts of n items.

    The parts are disjoint and complete, their sizes differ by at most one; some may be empty.
    """
    return index * n // parts, (index + 1) * n // parts


def mixed_seed(*values: int) -> int:
    """Return a well-mixed 64-bit seed of non-negative integers, such as (seed, epoch)."""
    return int(np.random.SeedSequence(values).generate_state(1, np.uint64)[0])


@functools.lru_cache(maxsize=1)
def _permutation(samples: int, seed: int, epoch: int) -> Tensor:
    """Return an epoch's order. One is kept: the steps of an epoch ask for it one by one."""
    generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
    return torch.randperm(samples, generator=generator)


@dataclass(frozen=True)
class SamplingPlan:
    """The order in which a job sees its samples. Pure: all ranks hold an equal one.

    An epoch takes every sample once; its last batch is smaller when batch_size does not divide
    samples. Steps count from 0, on through the epochs. Raises ValueError for a plan of nothing.
    """

    samples: int
    """Samples in the dataset."""
    batch_size: int
    """Samples in a global batch, that of all ranks together."""
    seed: int
    """Of the permutations; not negative."""
    shuffle: bool = True
    """False to keep the dataset's order in every epoch."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError("the dataset has no samples: give at least one")
        if self.batch_size < 1:
            raise ValueError(f"a global batch of {self.batch_size} samples: give at least 1")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} is negative: give 0 or more")

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see every sample once."""
        return -(-self.samples // self.batch_size)

    def _bounds(self, step: int) -> tuple[int, int, int]:
        """Return the step's epoch and its [start, stop) in the epoch's order."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        start = batch * self.batch_size
        return epoch, start, min(start + self.batch_size, self.samples)

    def _slice(self, epoch: int, start: int, stop: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(start, stop)
        return _permutation(self.samples, self.seed, epoch)[start:stop].clone()

    def indices(self, step: int) -> Tensor:
        """Return the samples of a step's global batch, new, 1-D int64."""
        return self._slice(*self._bounds(step))

    def share(self, step: int, rank: int, size: int) -> Tensor:
        """Return a rank's part of a step's global batch, new, 1-D int64, perhaps empty."""
        epoch, start, stop = self._bounds(step)
        first, last = part(stop - start, rank, size)
        return self._slice(epoch, start + first, start + last)

    def micro_batch_count(self, step: int, rank: int, size: int, micro_batch_size: int) -> int:
        """Return how many micro-batches a rank has in a step, without making them."""
        _, start, stop = self._bounds(step)
        first, last = part(stop - start, rank, size)
        return -(-(last - first) // micro_batch_size)

    def micro_batches(
        self, step: int, rank: int, size: int, micro_batch_size: int
    ) -> list[list[int]]:
        """Return a rank's share of a step in pieces of at most micro_batch_size samples.

        As few as can be, their sizes differ by at most one; none when the share is empty.
        """
        share: list[int] = self.share(step, rank, size).tolist()
        count = self.micro_batch_count(step, rank, size, micro_batch_size)
        return [share[slice(*part(len(share), i, count))] for i in range(count)]


class MicroBatch(list[int]):
    """The samples of a micro-batch, and the step that it is of."""

    def __init__(self, samples: Iterable[int], step: int) -> None:
        super().__init__(samples)
        self.step = step


class MicroBatchSampler(Sampler[list[int]]):
    """A rank's micro-batches of the steps [start, stop), in order, for a DataLoader.

    Which of them belong to which step says `plan.micro_batch_count`.
    """

    def __init__(
        self,
        plan: SamplingPlan,
        *,
        rank: int,
        size: int,
        micro_batch_size: int,
        start: int,
        stop: int,
    ) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"a micro-batch of {micro_batch_size} samples: give at least 1")
        self._plan = plan
        self._deal = (rank, size, micro_batch_size)
        self._steps = range(start, stop)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps:
            for samples in self._plan.micro_batches(step, *self._deal):
                yield MicroBatch(samples, step)

    def __len__(self) -> int:
        return sum(self.counts())

    def counts(self) -> Iterator[int]:
        """Yield the number of micro-batches of each step."""
        for step in self._steps:
            yield self._plan.micro_batch_count(step, *self._deal)


class SeededDataset(Dataset[Any]):
    """A dataset that draws the same random numbers for a sample in a step, whoever loads it.

    So augmentation is alike with any workers, on any ranks and in a job that goes on. It is fetched
    by micro-batches. Those of a dataset with a `__getitems__` of its own, which fetches many
    samples at once, have random numbers by micro-batch, and so by the number of ranks. Of torch's,
    Python's and numpy's default generators; afterwards they are as before.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        fetch = None if isinstance(dataset, Subset) else getattr(dataset, "__getitems__", None)
        self._fetch: Callable[[list[int]], list[Any]] | None = fetch

    def __getitems__(self, micro_batch: MicroBatch) -> list[Any]:
        """The samples of a micro-batch."""
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        base = mixed_seed(self._seed, micro_batch.step)
        try:
            if self._fetch:
                _seed_all(base + micro_batch[0])
                return self._fetch(list(micro_batch))
            return [self._item(base, index) for index in micro_batch]
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])

    def _item(self, base: int, index: int) -> Any:
        _seed_all(base + index)
        return self._dataset[index]


def _seed_all(seed: int) -> None:
    seed %= 1 << 64
    random.seed(seed)
    np.random.seed((seed ^ seed >> 32) % (1 << 32))
    torch.default_generator.manual_seed(seed)


def batches(
    dataset: Dataset[Any],
    plan: SamplingPlan,
    *,
    rank: int,
    size: int,
    micro_batch_size: int,
    start: int,
    stop: int,
    workers: int,
    start_method: str,
    collate: Collate = None,
) -> Iterator[list[Any]]:
    """Yield the steps [start, stop), each as the list of this rank's collated micro-batches.

    Local. The list is empty where the rank's share is. With `workers` processes, started by
    `start_method` ("fork", "forkserver" or "spawn"), loading runs ahead of the caller, over
    steps and epochs; they end when the iterator is exhausted, closed or dropped. What a sample
    draws at random is the same whoever loads it: see `SeededDataset`. Torch's default generator is
    left alone. Raises ValueError for a micro-batch of nothing.
    """
    sampler = MicroBatchSampler(
        plan, rank=rank, size=size, micro_batch_size=micro_batch_size, start=start, stop=stop
    )
    loader = DataLoader(
        SeededDataset(dataset, plan.seed),
        batch_sampler=sampler,
        num_workers=workers,
        multiprocessing_context=start_method if workers else None,
        collate_fn=collate,
        worker_init_fn=_outlast_signals,
        generator=torch.Generator().manual_seed(mixed_seed(plan.seed, start, rank)),
    )
    loaded = iter(loader)
    return ([next(loaded) for _ in range(count)] for count in sampler.counts())


def spread(dataset: Dataset[Any], samples: int) -> Dataset[Any]:
    """Return at most `samples` of a dataset, evenly spread over it; all of it for 0."""
    total = len(cast(Sized, dataset))
    if not 0 < samples < total:
        return dataset
    return Subset(dataset, [part(total, i, samples)[0] for i in range(samples)])


def validation_batches(
    dataset: Dataset[Any],
    *,
    rank: int,
    size: int,
    micro_batch_size: int,
    workers: int,
    start_method: str,
    collate: Collate = None,
) -> Iterator[Any]:
    """Yield this rank's collated micro-batches of the whole dataset, in its order, once.

    Local. Every sample goes to one rank; ranks may get unequal numbers of micro-batches, or none.
    """
    plan = SamplingPlan(len(cast(Sized, dataset)), size * micro_batch_size, seed=0, shuffle=False)
    steps = batches(
        dataset,
        plan,
        rank=rank,
        size=size,
        micro_batch_size=micro_batch_size,
        start=0,
        stop=plan.steps_per_epoch,
        workers=workers,
        start_method=start_method,
        collate=collate,
    )
    for micro_batches in steps:
        yield from micro_batches


def _outlast_signals(worker: int) -> None:
    """Leave it to the rank what a signal means that a scheduler sends to every process.

    SIGTERM is also how a rank ends a worker that does not answer: so not for long.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_later)


def _end_later(number: int, frame: FrameType | None) -> None:
    signal.alarm(_OUTLAST_S)
