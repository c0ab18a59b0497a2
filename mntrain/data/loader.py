"""Sharding of a user's own data loader: each rank gets its part of every batch.

Each batch of the loader is a global batch:

    loader:   [--- batch ---][--- batch ---]...        the same on every rank
    rank 1:       [---]          [---]                 the rank's contiguous part of each batch

The ranks see the same batches because the default generators of torch, Python and numpy, from
which a loader draws its shuffling, are seeded by (seed, epoch, dataset) while it draws. Ranks
compare the first batch of every new loader (`mntrain.alike.sample_digest`). A digest of the indices
of a batch, or its number in the pass where it has none, goes to the optimizers, which compare it
between ranks in each step.
"""

import copy
import math
import threading
import time
import warnings
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from numbers import Integral
from typing import Any, TypeGuard, cast
from weakref import WeakSet, WeakValueDictionary, finalize

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    default_collate,
)

from mntrain.alike.compared_loaders import compare_loaders, length_of_divided
from mntrain.alike.sample_digest import (
    FirstBatch,
    ends,
    of_batch,
    of_samples,
    sizes_of,
    spread_digest,
)
from mntrain.alike.values import Peers
from mntrain.balance.own_pace import BatchNumber
from mntrain.data.balancing import LoaderBalancing
from mntrain.data.cutting import cut, length_of, rows_of_tensors
from mntrain.data.randomness import SeededDraws, mixed_seed
from mntrain.data.sampling import GlobalBatch
from mntrain.data.source import (
    Alone,
    Divider,
    Feed,
    Part,
    Pass,
    Source,
    divided_parts,
    is_of_torch,
    rebuilt,
    share_of,
)
from mntrain.data.streams import StreamSource
from mntrain.ranks import Ranks
from zero.gradients.weights import DIGEST_BITS, BatchSource, DrawnBatch
from zero.optimizer import ZeroOptimizer


@dataclass
class Passes:
    """The passes over one dataset, and whether ranks have compared a loader."""

    epoch: int = 0  # of the next pass
    # By seed, which of the datasets that the world has had with it, in the order of their shards.
    numbers: dict[int, int] = field(default_factory=dict)
    left_early: list[BatchSource] = field(default_factory=list)  # sources of those that were
    balance: LoaderBalancing | None = None  # if its batches are divided by the ranks' speeds
    compared: bool = False


@dataclass(frozen=True)
class ShardOptions:
    """The options of `World.shard`, by its names.

    A job gives its own divider as `balance`. Raises ValueError for a wrong value.
    """

    seed: int = 0
    train: bool | None = None
    weight: Callable[[Any], float] | None = None
    balance: bool | Divider = False
    divided: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.balance, bool) or callable(self.balance)):
            raise ValueError(
                f"balance={self.balance!r}: give True or False; a cadence is of training jobs "
                "alone (--balance.mode cadence), since a loop of one's own decides when to step"
            )
        if self.train is not None and not isinstance(self.train, bool):
            raise ValueError(f"train={self.train!r}: give True or False, or leave it out")
        if not (isinstance(self.seed, Integral) and self.seed >= 0):
            raise ValueError(f"seed={self.seed!r}: give a whole number, 0 or more")
        if not (self.weight is None or callable(self.weight)):
            raise ValueError(f"weight={self.weight!r}: give a function of a batch, or None")


def passes_of(known: dict[int, Passes], *owners: Any) -> Passes | None:
    """Return the passes over the first object that takes weak references; None for lists, say.

    `known` has those over datasets and loaders, for as long as these live.
    """
    for owner in owners:
        if id(owner) in known:
            return known[id(owner)]
        try:
            finalize(owner, known.pop, id(owner), None).atexit = False
        except TypeError:
            continue
        return known.setdefault(id(owner), Passes())
    return None


_OF_OTHER_WORLDS = (
    "world of this process has: the batches of world.shard have their weights in optimizers of the "
    "same world alone; call mntrain.init() once and pass the world on, or give train=False to "
    "batches that are not trained"
)


class _Registries(threading.local):
    """The registries of the worlds that this thread has made."""

    def __init__(self) -> None:
        self.made = WeakSet["ShardRegistry"]()


_REGISTRIES = _Registries()


class ShardRegistry:
    """Makes the shards of a world, whose `optimizers` learn of the batches. Local.

    `ranks` is the world or a weak proxy of it. Its methods are looked up when they are called: a
    bound one would keep the world alive. `observe` is told of each load of a batch: a name, and its
    start by `time.perf_counter`. `compare`, None for one rank, is collective, and raises
    AgreedError on all ranks if their loaders differ.
    """

    def __init__(
        self,
        ranks: Ranks,
        optimizers: Sequence[ZeroOptimizer],
        observe: Callable[[str, float], None],
    ) -> None:
        self.rank, self.size, self.observe = ranks.rank, ranks.size, observe
        self.compare = partial(compare_loaders, ranks) if ranks.size > 1 else None
        # Of the pass from which a batch was drawn last: number (-1: batches apart), own and total
        # of each `Part` of this rank, one after the other.
        self.latest: array[int] | None = None
        self.samples = 0  # that this rank was handed out to train on
        self._ranks, self._optimizers = ranks, optimizers
        self._passes: dict[int, Passes] = {}
        self._datasets = Counter[int]()  # so far, by seed
        self.evaluations = set[object]()  # passes in progress of which the grad mode says so
        self._batch: DrawnBatch | None = None  # of a pass in progress
        self._balances: list[LoaderBalancing] = []
        # While it lives, a shard is that of each call with the same arguments; it keeps its loader.
        self._shards: WeakValueDictionary[Any, ShardedLoader] = WeakValueDictionary()
        _REGISTRIES.made.add(self)

    def shard(self, loader: Iterable[Any], options: ShardOptions) -> "ShardedLoader":
        """Return the shard of a loader. See `World.shard`."""
        if isinstance(loader, Dataset) or not isinstance(loader, Iterable):
            raise ValueError(
                f"loader is of type {type(loader).__name__}: give a torch DataLoader, or another "
                "iterable of global batches"
            )
        dataset, seed = getattr(loader, "dataset", None), options.seed
        if options.balance and (options.divided or isinstance(dataset, IterableDataset)):
            raise ValueError(
                "balance=True divides global batches, and neither the parts of divided=True nor "
                "the samples of an IterableDataset: leave one of the two out"
            )
        batches = length_of_divided(self._ranks, loader) if options.divided else None
        key = id(loader), id(options.weight), replace(options, weight=None)
        shard = self._shards.get(key)
        if shard is None:
            passes = passes_of(self._passes, dataset, loader) or Passes()
            if seed not in passes.numbers:
                passes.numbers[seed] = self._datasets[seed]
                self._datasets[seed] += 1
            if options.balance is True and self.size > 1 and passes.balance is None:
                # An epoch may have a dataset of its own, too short to measure speeds in it.
                passes.balance = next((one for one in self._balances if one.hand_over()), None)
                if passes.balance is None:
                    passes.balance = LoaderBalancing(self._ranks)
                    self._balances.append(passes.balance)
            known = passes_of(self._passes, loader)
            shard = ShardedLoader(loader, self, passes, known, options=options, batches=batches)
            self._shards[key] = shard
        return shard

    def begin_anew(self) -> None:
        """Let the next shards begin with the orders of a new world."""
        self._passes.clear()
        self._datasets.clear()
        self._shards.clear()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's object, by rank. Collective."""
        return self._ranks.gather(value)

    def warn(self, text: str) -> None:
        """Print a warning on rank 0. Local."""
        self._ranks.output.warn(text)

    def expect(self, batch: DrawnBatch) -> None:
        """Tell the optimizers of a batch that is handed out; its total is in samples, or None."""
        self._batch = batch
        for optimizer in self._open():
            optimizer.accumulation.expect(batch)

    def end_pass(self) -> None:
        """Tell the optimizers that a pass has ended."""
        self._batch = None
        for optimizer in self._open():
            optimizer.forget_batches(drawn=False)

    def drop(self, source: BatchSource) -> None:
        """Tell the optimizers that batches of a source which were not used yet never will be."""
        for optimizer in self._open():
            optimizer.accumulation.weight.drop(source)

    def tell(self, optimizer: ZeroOptimizer) -> None:
        """Tell an optimizer that was just made of the batch that was drawn before. Local."""
        optimizer.accumulation.evaluations = self.evaluations
        if self._batch is not None:
            optimizer.accumulation.weight.assume(self._batch)

    def check_optimizers(self) -> None:
        """Raise ValueError if only other worlds have optimizers, which learn of no batch. Local."""
        if self.size > 1 and not any(self._open()) and any(self._of_other_worlds()):
            raise ValueError(f"this world has no optimizer, and another {_OF_OTHER_WORLDS}")

    def unweighted_elsewhere(self) -> int:
        """Return how many means optimizers of other worlds have made of losses without weights."""
        return sum(one.accumulation.weight.unweighted for one in self._of_other_worlds())

    def _of_other_worlds(self) -> Iterator[ZeroOptimizer]:
        return (one for other in _REGISTRIES.made if other is not self for one in other._open())

    def check_exchanges(self) -> None:
        """Raise ValueError for an optimizer whose nodes cannot have unequal numbers of samples."""
        found = [one.replicas.sync_schedule for one in self._open() if one.replicas is not None]
        rare = [one for one in found if one.replicas > 1]
        if not all(one.weighted for one in rare):
            raise ValueError(
                "balance=True with an optimizer that has sync=: each node counts the same in an "
                "exchange, whatever its samples; add weighted=True to its description, such as "
                "LocalSGD(every=50, weighted=True)"
            )
        if any(one.max_staleness for one in rare):
            raise ValueError(
                "balance=True with an optimizer that has max_staleness: its nodes do not wait for "
                "each other, and to compare speeds ranks do; leave one of the two out"
            )

    def _open(self) -> Iterator[ZeroOptimizer]:
        return (optimizer for optimizer in self._optimizers if not optimizer.closed)


class ShardedLoader:
    """This rank's part of every batch of a loader, as `World.shard` says.

    A torch DataLoader is rebuilt with the same dataset and settings, also over an IterableDataset
    (`mntrain.data.streams`). Of any other iterable, and of a DataLoader of a class of its own,
    which may change batches, every rank makes the whole batches (`mntrain.data.cutting`).

    In training, a rank without samples gets the first one of the batch as a stand-in of weight 0,
    so that all ranks take part in the step; only what a forward pass updates, such as running
    statistics, is affected. With `divided`, it is the rank's last batch, and `batches` is the
    number of those of the longest loader, if that is known. Without `train`, RuntimeError is raised
    by a backward while a pass that evaluates is in progress, and at the end of one that trains with
    stand-ins, on any rank, of which no backward has used a batch.

    Local, but for the first pass over a loader, in which ranks compare it (in each pass over one
    that is not `known`, and in each one for training over one without indices), and for training
    with `balance`, with `divided`, or on streams of its own for each worker. A source of randomness
    other than the default generators must be seeded alike on all ranks by the caller. Raises
    ValueError for a loader with a DistributedSampler, whose batches are sharded already; iterating,
    ValueError for an empty batch and for a weight that is negative or not finite, TypeError for a
    batch that cannot be cut, and what `compare` of the registry raises.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        shards: ShardRegistry,
        passes: Passes,
        known: Passes | None,
        *,
        options: ShardOptions,
        batches: int | None,
    ) -> None:
        divided, balance = options.divided, options.balance
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers = [getattr(owner, "sampler", None) for owner in (loader, batch_sampler)]
        if not divided and any(isinstance(sampler, DistributedSampler) for sampler in samplers):
            raise ValueError(
                "the loader has a DistributedSampler, so its batches are sharded already: "
                "build it with shuffle=True or another sampler over all samples, or give "
                "divided=True"
            )
        self._loader, self._shards, self._passes = loader, shards, passes
        self._seed, self._weight, self._train = options.seed, options.weight, options.train
        self._known, self._divided, self._batches = known, divided, batches
        self._balance = passes.balance if balance is True else None
        divider = None if isinstance(balance, bool) else balance
        if self._balance is not None:
            divider = self._balance.division.divide
        self._drawn = BatchSource(balanced=divided or divider is not None)
        self._source: Source
        if divided:
            self._source = partial(divided_parts, _source(loader, Alone(), None), shards)
        else:
            self._source = _source(loader, shards, divider)
        # Of others, each step compares the indices of its samples.
        self._compares_passes = not divided and not _has_indices(loader)
        generators = [getattr(owner, "generator", None) for owner in (*samplers, batch_sampler)]
        of_torch = (one for one in generators if isinstance(one, torch.Generator))
        self._generator: torch.Generator | None = next(of_torch, None)
        collates = getattr(loader, "collate_fn", default_collate) is not default_collate
        self._may_drop = shards.size > 1 and collates
        self._state: dict[str, Any] | None = None  # of the training pass that was begun last
        self._resumes = False  # `_state` was loaded, and no pass has continued it
        self.sizes = 0, 0
        """Samples of this rank in the last batch that was handed out to train on, and of all."""

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration, which seeds its shuffling. Counted from 0 by dataset."""
        return self._passes.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._passes.epoch, self._state, self._resumes = epoch, None, False

    def __len__(self) -> int:
        """Return the number of batches of an epoch. Raises TypeError if the loader has no len."""
        if self._divided and self._batches is None:
            raise TypeError("the loader of a rank has no length")
        return len(cast(Sized, self._loader)) if self._batches is None else self._batches

    def __iter__(self) -> Iterator[Any]:
        return self._begin(training=torch.is_grad_enabled() if self._train is None else self._train)

    def _begin(self, *, training: bool) -> Iterator[Any]:
        resumes = training and self._resumes and self._state is not None
        state = self._state if resumes and self._state is not None else self._position()
        if training:  # an evaluation of the same data changes no order
            self._passes.epoch = state["epoch"] + 1
        number = self._passes.numbers.get(self._seed, 0)
        seed = mixed_seed(self._seed, state["epoch"], *([number] if number else []))
        seeds = seed, mixed_seed(seed, self._shards.rank)
        number = 0
        if training and self._balance:
            self._shards.check_exchanges()
            number = self._balance.begin_pass()
        known = self._known is not None and self._known.compared
        due = not known or (training and self._compares_passes)
        compare = self._compare if due and self._shards.compare is not None else None
        check = self._check_skipped if resumes and state.get("digest") is not None else None
        this = Pass(*seeds, state["batches"], state["stream"], training, number, compare, check)
        if not training:
            return self._evaluation(this)
        self._shards.check_optimizers()
        while self._passes.left_early:
            self._shards.drop(self._passes.left_early.pop())
        self._state, self._resumes = state, False
        return self._training(this, state)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch drawn for training, equal on all ranks. Local.

        Holds numbers, strings, lists, dicts and what the dataset's own `state_dict` returns.
        """
        return copy.deepcopy(self.position)

    @property
    def position(self) -> dict[str, Any]:
        """Return `state_dict` without a copy of what the dataset's own one has returned. Local."""
        if self._state is not None:
            return dict(self._state)
        return self._position() | {"generator": self._generator_state()}

    def assume_compared(self) -> None:
        """Let no pass compare the loader, whose data the ranks have compared before. Local."""
        if self._known is not None:
            self._known.compared = True

    def _position(self) -> dict[str, Any]:
        """Return the position at the beginning of the next epoch, without that of a generator."""
        number = self._passes.numbers.get(self._seed, 0)
        begin = {"batches": 0, "stream": None, "generator": None, "digest": None}
        return {"epoch": self.epoch, "dataset": number, **begin}

    def _is_over(self, state: dict[str, Any]) -> bool:
        """Return True for a position behind the last batch of an epoch, if its length is known."""
        with suppress(TypeError, NotImplementedError):
            return 0 < len(self) <= int(state["batches"])
        return False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next training pass continue where `state_dict` was taken. Local.

        On any number of ranks and workers, unless the dataset has a stream of its own for each
        worker. Indices are drawn again, and dropped; samples are read again only of streams
        without a `load_state_dict`, and of other iterables than DataLoaders. Behind the last batch
        of an epoch the next one begins, unless the loader has no length: then the pass is empty.
        """
        self.epoch = state_dict["epoch"] + self._is_over(state_dict)
        # Earlier versions had the same order for all datasets, and jobs no generators.
        self._passes.numbers[self._seed] = state_dict.get("dataset", 0)
        self._state, self._resumes = {"generator": None, **copy.deepcopy(state_dict)}, True

    def spread_digest(self) -> dict[str, str]:
        """Return `sample_digest.spread_digest` of the samples, or else of the batches. Local.

        Empty on other ranks than 0, which have the same, unless the data are `divided`.
        """
        if self._shards.rank and not self._divided:
            return {}
        return spread_digest(getattr(self._loader, "dataset", self._loader))

    def _generator_state(self) -> str | None:
        if self._generator is None:
            return None
        return self._generator.get_state().numpy().tobytes().hex()

    def _evaluation(self, this: Pass) -> Iterator[Any]:
        guessed = object()
        try:
            for part in self._recorded(this):
                if self._train is None:
                    self._shards.evaluations.add(guessed)
                yield part.batch
        finally:
            self._shards.evaluations.discard(guessed)

    def _training(self, this: Pass, state: dict[str, Any]) -> Iterator[Any]:
        if state["generator"] is None:
            state["generator"] = self._generator_state()
        elif self._generator is not None:
            saved = bytearray.fromhex(state["generator"])
            self._generator.set_state(torch.frombuffer(saved, dtype=torch.uint8))
        # Batches that were drawn but not used yet keep their weight: a prefetcher trains them after
        # the end, and so may the caller of next(iter(...)). If the pass was left early, the next
        # one drops them.
        balance, drawn_before, empty, short = self._balance, self._drawn.drawn, True, False
        before, uneven = self._shards.unweighted_elsewhere(), False
        try:
            for part in self._recorded(this):
                empty, short = False, short or part.short
                state["batches"] += 1
                state["stream"], state["digest"] = part.stream, part.digest
                own = self._own_weight(part)
                self._drawn.drawn += 1
                self._drawn.revision, self._drawn.samples = part.revision, part.own
                self._shards.samples += part.own
                self.sizes = part.own, part.total
                total = part.total if self._weight is None else None
                uneven |= total is None or self._drawn.balanced or total % self._shards.size > 0
                number = state["batches"] % (1 << DIGEST_BITS)
                digest = number if part.digest is None else part.digest
                self._shards.expect(self._drawn.latest(own, total, digest))
                yield part.batch
                if balance is not None:
                    balance.batch_done(part.own, part.total)
            unused = self._drawn.used <= drawn_before
            if uneven and unused and self._shards.unweighted_elsewhere() > before:
                raise ValueError(
                    "no optimizer of this world has trained a batch of the pass over world.shard "
                    f"that has ended, and an optimizer of another {_OF_OTHER_WORLDS}"
                )
            if self._train is None and short and unused:
                raise RuntimeError(
                    "a pass over world.shard that counts as training, since it began while "
                    "gradients were enabled, has ended without a backward of its batches, of which "
                    "some were stand-ins for ranks without a sample: give world.shard(loader, "
                    "train=False) to evaluate each sample once, or train=True"
                )
        except GeneratorExit:
            self._passes.left_early.append(self._drawn)
            raise
        finally:
            self._shards.end_pass()
            if balance is not None:
                balance.end_pass(this.number)
        if self._state is state:
            self._state = None
        if empty and self._is_over(state):
            if self._known is not None:  # no sample was compared
                self._known.compared = False
            yield from self._begin(training=True)

    def _recorded(self, this: Pass) -> Iterator[Part]:
        """Yield the parts of a pass, and note which were handed out last."""
        record = array("q")
        parts = iter(self._source(this))
        while True:
            start = time.perf_counter()
            if (part := next(parts, None)) is None:
                break
            self._shards.observe("data", start)
            record.extend((-1 if part.number is None else part.number, part.own, part.total))
            self._shards.latest = record
            yield part
        self._shards.latest = record

    def _check_skipped(self, digest: int | None) -> None:
        """Warn if the last batch that is skipped in a resumed pass is not the one of then. Local.

        `digest` is that of its samples now.
        """
        if self._state is not None and digest != self._state["digest"]:
            self._shards.warn(
                f"epoch {self._state['epoch']} goes on behind {self._state['batches']} batches, "
                "and these are not the ones that were drawn before, so samples are left out, or "
                "seen twice: the data or the batch size has changed, or the sampler draws from a "
                "generator that no checkpoint has. Let it draw from torch's default generators, or "
                "from a torch.Generator that is its attribute `generator`"
            )

    def _compare(self, first: FirstBatch) -> None:
        assert self._shards.compare is not None
        self._shards.compare(first)
        if self._known is not None:
            self._known.compared = True

    def _own_weight(self, part: Part) -> float:
        if self._weight is None or not part.own:
            self._warn_of_dropped(part)
            return part.own
        weight = float(self._weight(part.batch))
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight() returned {weight}: return a finite number, 0 or more")
        return weight

    def _warn_of_dropped(self, part: Part) -> None:
        """Warn, once, of a batch with fewer rows than the samples that it counts as."""
        if not self._may_drop or not part.own:
            return
        rows, rank = rows_of_tensors(part.batch), self._shards.rank
        if rows is not None and rows < part.own:
            self._may_drop = False
            warnings.warn(
                f"collate_fn made {rows} rows of the {part.own} samples of rank {rank}, whose loss "
                f"counts as a mean over {part.own}: if it leaves samples out, give "
                "world.shard(loader, weight=) a function that returns the number of those in a "
                "batch",
                stacklevel=4,
            )


def _source(loader: Any, peers: Peers, divider: Divider | None) -> Source:
    """Return the cheapest source of a loader's batches."""
    shares = partial(_shares, peers, divider)
    if _has_indices(loader):
        return _indexed_source(loader, shares)
    if is_of_torch(loader) and isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, peers).parts
    return partial(_cut_parts, loader, shares)


def _has_indices(loader: Any) -> TypeGuard[DataLoader[Any]]:
    """Return whether a loader draws indices of samples in batches."""
    return (
        is_of_torch(loader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


_SUBCLASS = (
    "mntrain: the whole batches of a {kind} are cut, since its class may change them: give a plain "
    "torch DataLoader, with its dataset and collate_fn, whose ranks load their own samples alone"
)

# `_shares` of some ranks, by their speeds if these are balanced.
_Shares = Callable[..., Iterator[tuple[Any, slice, Part]]]


def _shares(
    peers: Peers,
    divider: Divider | None,
    this: Pass,
    batches: Iterator[Any],
    *,
    length: Callable[[Any], int],
    describe: Callable[[Any, int], FirstBatch],
) -> Iterator[tuple[Any, slice, Part]]:
    """Yield each batch of a pass with this rank's rows, and its part, still without them.

    Parts are equal, or as a divider says. Ranks compare the first batch.
    """
    compare = this.compare
    for number, batch in enumerate(batches):
        if number < this.done:
            continue
        samples = length(batch)
        if compare is not None:
            compare(describe(batch, samples))
            compare = None
        bounds, revision = None, 0
        if divider is not None and this.stand_ins:
            bounds, revision = divider(samples, BatchNumber(this.number, number))
        rows, part = share_of(samples, peers.rank, peers.size, bounds)
        if part.own or this.stand_ins:
            yield batch, rows, part._replace(revision=revision, number=number)
    if compare is not None:
        compare(describe(None, 0))


def _cut_parts(loader: Iterable[Any], shares: _Shares, this: Pass) -> Iterator[Part]:
    """Yield this rank's part of each batch of any iterable of whole batches, which it cuts."""

    def describe(batch: Any, samples: int) -> FirstBatch:
        return of_batch(loader, batch, samples, again)

    def again() -> Any:
        return next(islice(_seeded(loader, this.seed), this.done, None), None)

    def length(batch: Any) -> int:
        try:
            return length_of(batch)
        except TypeError as error:
            if isinstance(loader, DataLoader):
                error.add_note(_SUBCLASS.format(kind=type(loader).__qualname__))
            raise

    batches = _seeded(loader, this.seed)
    if getattr(loader, "collate_fn", None) is default_collate:  # which makes lists of columns
        batches = (tuple(batch) if type(batch) is list else batch for batch in batches)
    for batch, rows, part in shares(this, batches, length=length, describe=describe):
        yield part._replace(batch=cut(batch, rows))


def _indexed_source(loader: DataLoader[Any], shares: _Shares) -> Source:
    """Return the source of a map-style loader, rebuilt to load this rank's samples only."""
    feed, generator = Feed(), torch.Generator()  # it seeds the workers: differently on each rank
    own = rebuilt(loader, batch_sampler=feed, generator=generator)

    def describe(batch: Sequence[Any] | None, samples: int) -> FirstBatch:
        digest = None if batch is None else _digest(batch)
        return of_samples(loader.dataset, ends(batch or []), sizes_of(loader, samples), digest)

    def draw(this: Pass, parts: deque[Part]) -> Iterator[list[Any]]:
        """Yield the indices of this rank's part, or stand-in, of each batch."""
        batches = _checked(
            this, _seeded(cast(Iterable[Any], loader.batch_sampler), this.seed, _sequence)
        )
        for indices, rows, part in shares(this, batches, length=len, describe=describe):
            parts.append(part._replace(digest=_digest(indices)))
            yield indices[rows]

    def parts_of(this: Pass) -> Iterator[Part]:
        generator.manual_seed(this.rank_seed)
        # Workers load ahead: each part is queued from sampling until its batch is yielded.
        parts = deque[Part]()
        drawn = draw(this, parts)
        # Ranks compare the first batch here, before the loader has started its workers.
        feed.items = chain(list(islice(drawn, 1)), drawn)
        for batch in own:
            yield parts.popleft()._replace(batch=batch)

    return parts_of


def _checked(this: Pass, batches: Iterator[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Yield the indices of batches, and check those of the last one that a pass skips."""
    for number, indices in enumerate(batches, 1):
        if this.check is not None and number == this.done:
            this.check(_digest(indices))
        yield indices


def _sequence(indices: Iterable[Any]) -> Sequence[Any]:
    return indices if isinstance(indices, GlobalBatch) else list(indices)


def _digest(indices: Sequence[Any]) -> int | None:
    """Return 16 bits of the indices of a batch; None if they are not numbers or strings."""
    if isinstance(indices, GlobalBatch):
        return indices.digest
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
