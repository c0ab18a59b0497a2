"""Sharding of a user's own data loader: each rank gets its part of every batch.

Each batch of the loader is a global batch:

    loader:   [--- batch ---][--- batch ---]...        the same on every rank
    rank 1:       [---]          [---]                 the rank's contiguous part of each batch

The ranks see the same batches because the default generators of torch, Python and numpy, from
which a loader draws its shuffling, are seeded by (seed, epoch) while it draws. Ranks compare the
first batch of every new loader (`mntrain.data.first_batch`). Where the batches are made of indices,
a digest of them goes to the optimizers, which compare it between ranks in each step.
"""

import copy
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, TypeVar, cast
from weakref import finalize

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from mntrain.data.cutting import Lists, cut, length_of
from mntrain.data.divided import DividedSource
from mntrain.data.first_batch import FirstBatch, of_batch, of_indices
from mntrain.data.loader_balance import LoaderBalance
from mntrain.data.randomness import SeededDraws, mixed_seed
from mntrain.data.source import Part, Pass, PassRecord, ShardContext, Source, rebuilt
from mntrain.data.streams import StreamSource
from zero.gradients.weights import BatchSource

T = TypeVar("T")


@dataclass
class Passes:
    """The passes over one dataset: the epoch of the next one, and how the last one ended.

    And the ranks' speeds, if its batches are divided by them.
    """

    epoch: int = 0
    left_early: bool = False
    balance: LoaderBalance | None = None


@dataclass
class Comparison:
    """State of the comparison of a loader over ranks; `always` if it cannot be recognized later."""

    always: bool = True
    done: bool = False


class ByOwner(Generic[T]):
    """Values by the object that they are about, for as long as it lives."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}

    def of(self, *owners: Any) -> T | None:
        """Return the value of the first object that takes weak references; None for lists, say."""
        for owner in owners:
            if id(owner) in self._values:
                return self._values[id(owner)]
            try:
                finalize(owner, self._values.pop, id(owner)).atexit = False
            except TypeError:
                continue
            return self._values.setdefault(id(owner), self._make())
        return None


class PassesByDataset:
    """The passes over every dataset that a world has sharded, for as long as the dataset lives."""

    def __init__(self) -> None:
        self._passes = ByOwner(Passes)

    def of(self, loader: Any) -> Passes:
        """Return the passes over a loader's dataset, or over the loader itself."""
        return self._passes.of(getattr(loader, "dataset", None), loader) or Passes()


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

    `divided`: the loader of each rank has the rank's own part of the data, and its batches are
    handed out whole; together they are the global batches. A rank that has no more gets its last
    batch as a stand-in, until no rank has any more. `batches` are those of the longest loader.

    Local, but for the first pass over a loader, in which ranks compare it (`comparison`), for
    training with `balance`, which is iterated by the training thread, and for training with
    `divided` or on an IterableDataset with streams of its own for each worker. A source of
    randomness other than the default generators, such as a sampler with its own generator, must be
    seeded alike on all ranks by the caller. Raises ValueError for a loader with a
    DistributedSampler, whose batches are sharded already; iterating, ValueError for an empty batch
    and for a weight that is negative or not finite, TypeError for a batch that cannot be cut, and
    what `compare` of the context raises.
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
        comparison: Comparison | None = None,
        divided: bool = False,
        batches: int | None = None,
    ) -> None:
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers = [getattr(owner, "sampler", None) for owner in (loader, batch_sampler)]
        if not divided and any(isinstance(sampler, DistributedSampler) for sampler in samplers):
            raise ValueError(
                "the loader has a DistributedSampler, so its batches are sharded already: "
                "build it with shuffle=True or another sampler over all samples, or give "
                "divided=True"
            )
        self._loader, self._context, self._passes = loader, context, passes or Passes()
        self._seed, self._weight = seed, weight
        self._comparison = comparison or Comparison()
        self._batches = batches
        self._drawn = BatchSource(balanced=divided or context.balance is not None)
        if divided:
            self._source: Source = DividedSource(_source(loader, context.alone(), lists), context)
        else:
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
        return len(cast(Sized, self._loader)) if self._batches is None else self._batches

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
        due = self._comparison.always or not self._comparison.done
        compare = self._compare if due and self._context.compare is not None else None
        this = Pass(own_seed, seed, state["batches"], state["stream"], training, number, compare)
        if not training:
            return (part.batch for part in self._recorded(this))
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
            for part in self._recorded(this):
                state["batches"] += 1
                state["stream"] = part.stream
                own = self._own_weight(part)
                self._drawn.drawn += 1
                self._drawn.plan, self._drawn.samples = part.plan, part.own
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

    def _recorded(self, this: Pass) -> Iterator[Part]:
        """Yield the parts of a pass, and note which were handed out last."""
        record = PassRecord()
        self._context.note(record)
        for part in self._source.parts(this):
            record.batches.append((part.number, part.own, part.total))
            self._context.note(record)
            yield part
        self._context.note(record)

    def _compare(self, first: FirstBatch) -> None:
        """Compare the first batch with those of the other ranks. Collective."""
        assert self._context.compare is not None
        self._context.compare(first)
        self._comparison.done = True

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
        compare = this.compare
        for index, batch in enumerate(_seeded(self._loader, this.seed)):
            if index < this.done:
                continue
            total = length_of(batch, self._lists)
            if compare is not None:
                compare(of_batch(self._loader, batch, total, partial(self._anew, this)))
                compare = None
            share = self._context.part_of(total, this, index)
            if share.own or this.stand_ins:
                own_rows = cut(batch, share.rows, self._lists)
                yield Part(own_rows, share.own, total, plan=share.plan, number=index)
        if compare is not None:
            compare(of_batch(self._loader, None, 0, partial(self._anew, this)))

    def _anew(self, this: Pass) -> Iterator[Any]:
        """Iterate over the loader again, from the first batch of a pass on."""
        return islice(_seeded(self._loader, this.seed), this.done, None)


class _IndexedSource:
    """A DataLoader over a map-style dataset, rebuilt to load this rank's samples only."""

    def __init__(self, loader: DataLoader[Any], context: ShardContext) -> None:
        self._generator = torch.Generator()  # seeds the workers: differently on each rank
        self._sampler = _ShardSampler(loader, context)
        self._loader = rebuilt(loader, batch_sampler=self._sampler, generator=self._generator)

    def parts(self, this: Pass) -> Iterator[Part]:
        """Yield this rank's part of each batch of a pass."""
        self._generator.manual_seed(this.rank_seed)
        # Workers load ahead: each part is queued from sampling until its batch is yielded.
        parts = self._sampler.begin(this)
        for batch in self._loader:
            yield parts.popleft()._replace(batch=batch)


class _ShardSampler:
    """This rank's part, or stand-in, of each index list of a loader's batch sampler."""

    def __init__(self, loader: DataLoader[Any], context: ShardContext) -> None:
        self._loader, self._context = loader, context
        self._batches = cast(Iterable[Iterable[Any]], loader.batch_sampler)
        self._drawn: Iterator[list[Any]] = iter(())

    def begin(self, this: Pass) -> deque[Part]:
        """Begin a pass, which is iterated once; return the queue to which it appends its parts.

        Ranks compare the first batch here, before a loader has started its workers.
        """
        parts = deque[Part]()
        drawn = self._draw(this, parts)
        self._drawn = chain(list(islice(drawn, 1)), drawn)
        return parts

    def __iter__(self) -> Iterator[list[Any]]:
        return self._drawn

    def _draw(self, this: Pass, parts: deque[Part]) -> Iterator[list[Any]]:
        compare = this.compare
        for number, batch in enumerate(_seeded(self._batches, this.seed, list)):
            if number < this.done:
                continue
            digest = _digest(batch)
            if compare is not None:
                compare(of_indices(self._loader, batch, digest))
                compare = None
            share = self._context.part_of(len(batch), this, number)
            if share.own or this.stand_ins:
                total, plan = len(batch), share.plan
                parts.append(Part(None, share.own, total, digest, plan=plan, number=number))
                yield batch[share.rows]
        if compare is not None:
            compare(of_indices(self._loader, [], None))


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
