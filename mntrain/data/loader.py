"""Sharding of a user's own data loader: each rank gets its part of every batch.

Each batch of the loader is a global batch:

    loader:   [--- batch ---][--- batch ---]...        the same on every rank
    rank 1:       [---]          [---]                 the rank's contiguous part of each batch

The ranks see the same batches because the default generators of torch, Python and numpy, from
which a loader draws its shuffling, are seeded by (seed, epoch) while it draws. Where the batches
are made of indices, a digest of them goes to the optimizers, which compare it between ranks.
"""

import copy
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast
from weakref import finalize

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from mntrain.data.cutting import Lists, cut, length_of
from mntrain.data.loader_balance import LoaderBalance
from mntrain.data.randomness import SeededDraws, mixed_seed
from mntrain.data.source import Part, Pass, ShardContext, Source, rebuilt
from mntrain.data.streams import StreamSource
from zero.step_weights import BatchSource


@dataclass
class Passes:
    """The passes over one dataset: the epoch of the next one, and how the last one ended.

    And the ranks' speeds, if its batches are divided by them.
    """

    epoch: int = 0
    left_early: bool = False
    balance: LoaderBalance | None = None


class PassesByDataset:
    """The passes over every dataset that a world has sharded, for as long as the dataset lives."""

    def __init__(self) -> None:
        self._passes: dict[int, Passes] = {}

    def of(self, loader: Any) -> Passes:
        """Return the passes over a loader's dataset, or over the loader itself."""
        for owner in (getattr(loader, "dataset", None), loader):
            if id(owner) in self._passes:
                return self._passes[id(owner)]
            try:
                finalize(owner, self._passes.pop, id(owner)).atexit = False
            except TypeError:  # such as a list: it takes no weak references
                continue
            return self._passes.setdefault(id(owner), Passes())
        return Passes()


class ShardedLoader:
    """This rank's part of every batch of a loader. Each iteration over it is one epoch.

    A torch DataLoader over a map-style dataset is rebuilt with the same dataset and settings, so
    that each rank loads only its own samples. Over an IterableDataset it is rebuilt so that each
    sample goes to one rank (`mntrain.data.streams`). For any other iterable, every rank makes the
    whole batches and cuts its part (`mntrain.data.cutting`, with `lists`).

    Training: before it hands out a batch, it tells the optimizers this rank's number of samples in
    it, or `weight(batch)` of its part, and that of all ranks. If a batch has fewer samples than
    there are ranks, a rank without samples gets the batch's first sample as a stand-in of weight 0,
    so that all ranks take part in the step. Only state that a forward pass updates, such as running
    statistics, is affected by stand-ins.

    Evaluation, which is an iteration that begins while gradients are disabled (`torch.no_grad`):
    no stand-ins are handed out, so each sample is seen once, and ranks may get unequal numbers of
    batches. The optimizers are told nothing.

    With `balance` in the context, parts are in proportion to the ranks' speeds instead of equal.

    Local, but for training with `balance`, which is iterated by the training thread, or on an
    IterableDataset with streams of its own for each worker. A source of randomness other than the
    default generators, such as a sampler with its own generator, must be seeded alike on all ranks
    by the caller. Raises ValueError for a loader with a
    DistributedSampler, whose batches are sharded already; iterating, ValueError for an empty batch
    and for a weight that is negative or not finite, and TypeError for a batch that cannot be cut.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        context: ShardContext,
        passes: Passes | None = None,
        *,
        seed: int = 0,
        weight: Callable[[Any], float] | None = None,
        lists: Lists = None,
    ) -> None:
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers = [getattr(owner, "sampler", None) for owner in (loader, batch_sampler)]
        if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
            raise ValueError(
                "the loader has a DistributedSampler, so its batches are sharded already: "
                "build it with shuffle=True or another sampler over all samples"
            )
        self._loader, self._context, self._passes = loader, context, passes or Passes()
        self._seed, self._weight = seed, weight
        self._drawn = BatchSource(balanced=context.balance is not None)
        self._source = _source(loader, context, lists)
        generators = [getattr(sampler, "generator", None) for sampler in samplers]
        self._generator: torch.Generator | None = next(filter(None, generators), None)
        self._state: dict[str, Any] | None = None  # of the training pass that was begun last
        self._resumes = False  # `_state` was loaded, and no pass has continued it

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration, which seeds its shuffling. Counted from 0 by dataset."""
        return self._passes.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._passes.epoch, self._state, self._resumes = epoch, None, False

    def __len__(self) -> int:
        """Return the number of batches of an epoch. Raises TypeError if the loader has no len."""
        return len(cast(Sized, self._loader))

    def __iter__(self) -> Iterator[Any]:
        training = torch.is_grad_enabled()
        if training and self._resumes and self._state is not None:
            state = self._state
        else:
            state = {"epoch": self.epoch, "batches": 0, "stream": None, "generator": None}
        if training:  # an evaluation of the same data changes no order
            self._passes.epoch = state["epoch"] + 1
        seed = mixed_seed(self._seed, state["epoch"])
        own_seed = mixed_seed(seed, self._context.rank)
        balance = self._context.balance
        number = balance.begin_pass() if training and balance else 0
        this = Pass(own_seed, seed, state["batches"], state["stream"], training, number)
        if not training:
            return (part.batch for part in self._source.parts(this))
        if self._passes.left_early:
            self._passes.left_early = False
            self._context.forget(True)
        self._state, self._resumes = state, False
        return self._train(this, state)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch drawn for training, equal on all ranks. Local.

        Holds numbers, strings, lists, dicts and what the dataset's own `state_dict` returns.
        """
        if self._state is not None:
            return copy.deepcopy(self._state)
        generator = self._generator_state()
        return {"epoch": self.epoch, "batches": 0, "stream": None, "generator": generator}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next training pass continue where `state_dict` was taken. Local.

        On any number of ranks and workers, unless the dataset has a stream of its own for each
        worker. Indices are drawn again, and dropped; samples are read again only of streams
        without a `load_state_dict`, and of other iterables than DataLoaders.
        """
        self.epoch = state_dict["epoch"]
        self._state = copy.deepcopy(state_dict)
        self._resumes = True

    def _generator_state(self) -> str | None:
        if self._generator is None:
            return None
        return self._generator.get_state().numpy().tobytes().hex()

    def _train(self, this: Pass, state: dict[str, Any]) -> Iterator[Any]:
        if state["generator"] is None:
            state["generator"] = self._generator_state()
        elif self._generator is not None:
            saved = bytearray.fromhex(state["generator"])
            self._generator.set_state(torch.frombuffer(saved, dtype=torch.uint8))
        # Batches that were drawn but not used yet keep their weight: a prefetcher trains them after
        # the end, and so may the caller of next(iter(...)). If the pass was left early, the next
        # one drops them.
        balance = self._context.balance
        try:
            for part in self._source.parts(this):
                state["batches"] += 1
                state["stream"] = part.stream
                own = self._own_weight(part)
                self._drawn.drawn += 1
                self._drawn.plan = part.plan
                total = part.total if self._weight is None else None
                self._context.expect(own, total, part.digest, self._drawn)
                yield part.batch
                if balance is not None:
                    balance.batch_done(part.own, part.total)
        except GeneratorExit:
            self._passes.left_early = True
            raise
        finally:
            self._context.forget(False)
            if balance is not None:
                balance.end_pass(this.number)
        if self._state is state:
            self._state = None

    def _own_weight(self, part: Part) -> float:
        if self._weight is None or not part.own:
            return part.own
        weight = float(self._weight(part.batch))
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight() returned {weight}: return a finite number, 0 or more")
        return weight


def _source(loader: Any, context: ShardContext, lists: Lists) -> Source:
    """Return the cheapest source of a loader's batches."""
    # A subclass with its own __iter__ cannot be rebuilt: its batches are cut instead.
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        if isinstance(loader.dataset, IterableDataset):
            return StreamSource(loader, context, lists)
        if loader.batch_sampler is not None:
            return _IndexedSource(loader, context)
    if lists is None and getattr(loader, "collate_fn", None) is default_collate:
        lists = "columns"
    return _CutSource(loader, context, lists)


class _CutSource:
    """Any iterable of whole batches, which every rank cuts."""

    def __init__(self, loader: Iterable[Any], context: ShardContext, lists: Lists) -> None:
        self._loader, self._context, self._lists = loader, context, lists

    def parts(self, this: Pass) -> Iterator[Part]:
        """Yield this rank's part of each batch of a pass."""
        for index, batch in enumerate(_seeded(self._loader, this.seed)):
            if index < this.done:
                continue
            total = length_of(batch, self._lists)
            share = self._context.part_of(total, this, index)
            if share.own or this.stand_ins:
                own_rows = cut(batch, share.rows, self._lists)
                yield Part(own_rows, share.own, total, plan=share.plan)


class _IndexedSource:
    """A DataLoader over a map-style dataset, rebuilt to load this rank's samples only."""

    def __init__(self, loader: DataLoader[Any], context: ShardContext) -> None:
        self._generator = torch.Generator()  # seeds the workers: differently on each rank
        self._sampler = _ShardSampler(cast(Iterable[Any], loader.batch_sampler), context)
        self._loader = rebuilt(loader, batch_sampler=self._sampler, generator=self._generator)

    def parts(self, this: Pass) -> Iterator[Part]:
        """Yield this rank's part of each batch of a pass."""
        self._generator.manual_seed(this.rank_seed)
        # Workers load ahead: each part is queued from sampling until its batch is yielded.
        parts = self._sampler.begin(this)
        for batch in self._loader:
            yield parts.popleft()._replace(batch=batch)


class _ShardSampler:
    """This rank's part, or stand-in, of each index list of a batch sampler."""

    def __init__(self, batches: Iterable[Iterable[Any]], context: ShardContext) -> None:
        self._batches, self._context = batches, context
        self._this = Pass(0, 0, 0, None, stand_ins=True)
        self._parts = deque[Part]()

    def begin(self, this: Pass) -> deque[Part]:
        """Set the next iteration's pass; return the queue to which it appends its parts."""
        self._this, self._parts = this, deque()
        return self._parts

    def __iter__(self) -> Iterator[list[Any]]:
        this, parts = self._this, self._parts
        for number, batch in enumerate(_seeded(self._batches, this.seed, list)):
            if number < this.done:
                continue
            share = self._context.part_of(len(batch), this, number)
            if share.own or this.stand_ins:
                parts.append(Part(None, share.own, len(batch), _digest(batch), plan=share.plan))
                yield batch[share.rows]


def _digest(indices: list[Any]) -> int | None:
    """Return 16 bits of the indices of a batch; None if they are not numbers or strings."""
    try:
        array = np.asarray(indices)
    except ValueError:  # tuples of unequal length
        return None
    return zlib.crc32(array.tobytes()) & 0xFFFF if array.dtype.kind in "biufUS" else None


def _seeded(
    source: Iterable[Any], seed: int, take: Callable[[Any], Any] = lambda item: item
) -> Iterator[Any]:
    """Iterate over a source, with the default generators seeded while it draws."""
    draws, iterator = SeededDraws(seed), None
    while True:
        with draws:
            try:
                iterator = iter(source) if iterator is None else iterator
                item = take(next(iterator))
            except StopIteration:
                return
        yield item
