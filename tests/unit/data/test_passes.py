"""Passes over a shard: whether they train, the order of each, and where a resumed one begins."""

import random
import threading
from functools import partial
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from first_of_two import zero
from sharding import Clock, Log, Numbers, balancing_of, concatenated, in_turns, sharded
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from mntrain.data.loader import Passes, ShardOptions, ShardRegistry
from mntrain.data.randomness import SeededDraws, mixed_seed
from mntrain.data.source import Alone


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.arange(self.n))


class StreamWithLength(Stream):
    def __len__(self):
        return self.n


def shuffled(n=20, batch_size=3, **options):
    return DataLoader(Numbers(n), batch_size, shuffle=True, **options)


def registry(ranks=None):
    """The shards of a world of one rank."""
    return ShardRegistry(ranks or Alone(), [], lambda name, start: None)


def shard(shards, loader, seed=0, **options):
    return shards.shard(loader, ShardOptions(seed, **options))


def drawn(parts):
    return [n for batch in parts for n in batch.tolist()]


# ---- training and evaluation ----

MODES = {"enabled": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("train", [None, True, False])
def test_train_says_what_a_pass_is_and_the_grad_mode_what_is_not_said(mode, train):
    log = Log()
    parts = sharded(shuffled(7, 4), rank=0, size=4, log=log, train=train)
    with MODES[mode]():
        batches = [len(drawn([batch])) for batch in parts]
    trains = train if train is not None else mode == "enabled"
    assert (batches, log.shares) == (([1, 1], [1, 0]) if trains else ([1], []))
    assert parts.epoch == trains


def in_thread(parts):
    """All batches, which a thread has drawn: the grad mode is that of a thread."""
    got, errors = [], []

    def draw():
        try:
            got.extend(parts)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return got


LOADERS = {
    "map": partial(shuffled, 7, 4),
    "listed": lambda: list(shuffled(7, 4)),
    "stream": lambda: DataLoader(Stream(7), batch_size=4),
}


@pytest.mark.parametrize("draw", [list, in_thread])
@pytest.mark.parametrize("kind", LOADERS)
def test_an_evaluation_that_was_taken_for_training_is_told_so_on_all_ranks(kind, draw):
    said = []
    for rank in range(4):
        log = Log()
        log.trains = False
        with pytest.raises(RuntimeError, match="train=False") as error:
            draw(sharded(LOADERS[kind](), rank, 4, log))
        said.append(str(error.value))
        for train, batches in ((True, 2), (False, 1 + (rank < 3))):
            seen = draw(sharded(LOADERS[kind](), rank, 4, log, train=train))
            assert len(seen) >= batches - 1
    assert len({*said}) == 1


def test_divided_data_of_which_a_rank_has_none_are_no_evaluation_either():
    def body(rank, gather):
        log = Log()
        log.trains = False
        loader = DataLoader(Numbers(2 * rank + 1), batch_size=1)
        parts = sharded(loader, rank, 2, log, gather=gather, divided=True, batches=3)
        with pytest.raises(RuntimeError, match="stand-ins") as error:
            list(parts)
        return str(error.value)

    assert len({*in_turns(2, body)}) == 1


def test_a_pass_without_stand_ins_or_that_was_left_or_trained_ends_without_an_error():
    log = Log()
    log.trains = False
    list(sharded(shuffled(8, 4), 0, 4, log))  # each rank has a sample of each batch
    next(iter(sharded(shuffled(3, 4), 0, 4, log)))
    log.trains = True
    assert len(list(sharded(shuffled(7, 4), 3, 4, log))) == 2


def backward_of(shards):
    """A backward of an optimizer of the world."""
    model = torch.nn.Linear(1, 1)
    optimizer = zero(model, lr=0.1)
    shards.tell(optimizer)

    def backward():
        optimizer.zero_grad()
        with torch.inference_mode(mode=False), torch.enable_grad():
            model(torch.ones(1, 1)).sum().backward()

    return backward


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_a_backward_in_a_pass_that_was_taken_for_an_evaluation_is_refused(mode):
    shards = registry()
    backward, loader = backward_of(shards), shuffled(8, 4)
    with MODES[mode]():
        begun = iter(shard(shards, loader))
    backward()  # no batch was drawn yet
    next(begun)  # while gradients are enabled
    for _ in range(2):
        with pytest.raises(RuntimeError, match="train=True"):
            backward()
    list(begun)
    backward()
    with MODES[mode]():
        for _ in shard(shards, loader):
            break  # ends the pass
        backward()
        said = [iter(shard(shards, loader, train=train)) for train in (True, False)]
    for batches in said:
        next(batches)
        backward()


def test_a_look_into_a_second_loader_drops_no_batch_of_the_first():
    shards, (first, second) = registry(), (shuffled(7, 4), shuffled(8, 4))
    model, weights = torch.nn.Linear(1, 1), []
    optimizer = zero(model, lr=0.1)
    shards._optimizers.append(optimizer)
    for _ in shard(shards, first):
        next(iter(shard(shards, second)))  # of 4 samples in each step
        model(torch.ones(1, 1)).sum().backward()
        weights.append(optimizer.step().weight)
        optimizer.zero_grad()
    assert weights == [4, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train": "yes"}, "train='yes': give True or False"),
        ({"seed": None}, "seed=None: give a whole number, 0 or more"),
        ({"seed": -1}, "seed=-1: give a whole number"),
        ({"weight": "tokens"}, "weight='tokens': give a function of a batch, or None"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        shard(registry(), shuffled(), **options)


def test_shards_of_one_loader_that_train_and_evaluate_have_one_count_of_epochs():
    shards, loader = registry(), shuffled()
    training, evaluation = (shard(shards, loader, train=train) for train in (True, False))
    assert training is shard(shards, loader, train=True)
    first = drawn(training)
    assert (drawn(evaluation), evaluation.epoch, training.epoch) == (drawn(evaluation), 1, 1)
    assert first != drawn(training) == drawn(sharded_at(1))


def sharded_at(epoch):
    parts = sharded(shuffled())
    parts.epoch = epoch
    return parts


# ---- classes derived from DataLoader ----


class Scaled(DataLoader):
    """Changes batches as they leave the loader's own iterator."""

    def _get_iterator(self):
        return map(self.scale, super()._get_iterator())

    def scale(self, batch):
        return [column * 20 for column in batch]


class ChangedBatches(DataLoader):
    """Changes what its batches are made of."""

    def __init__(self, data, **options):
        super().__init__(data, **options)
        self.calls = 0

    @property
    def _index_sampler(self):
        return [[1, 0, 5], [2, 4], [3]]


def patched(data, **options):
    """A DataLoader of torch, one of whose methods was replaced."""
    loader = DataLoader(data, **options)
    own = loader._get_iterator
    loader._get_iterator = lambda: map(partial(Scaled.scale, loader), own())
    return loader


PAIRS = TensorDataset(torch.arange(7.0), torch.arange(7.0) * 2)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Scaled(PAIRS, batch_size=3, shuffle=True),
        lambda: patched(PAIRS, batch_size=3),
        lambda: Scaled(PAIRS, batch_size=3, num_workers=1, multiprocessing_context="fork"),
        lambda: ChangedBatches(PAIRS, batch_size=3),
        lambda: Scaled(StreamOfPairs(), batch_size=3),
    ],
    ids=["shuffled", "patched", "workers", "indices", "stream"],
)
def test_a_derived_loader_is_read_as_it_is(make, size):
    with SeededDraws(mixed_seed(0, 0)):
        expected = [[column.tolist() for column in batch] for batch in make()]
    whole = concatenated(make(), size)
    assert [[column.tolist() for column in batch] for batch in whole] == expected


class StreamOfPairs(IterableDataset):
    def __iter__(self):
        return iter(PAIRS)


def test_a_derived_loader_whose_batches_cannot_be_cut_is_refused_with_the_way_out():
    class OwnConstructor(DataLoader):
        """Has a constructor of its own."""

    loader = OwnConstructor(Numbers(4), collate_fn=lambda samples: SimpleNamespace(samples=samples))
    with pytest.raises(TypeError, match="cannot be cut") as error:
        list(sharded(loader, 0, 2))
    assert "give a plain torch DataLoader" in "".join(error.value.__notes__)


# ---- the order of epochs ----


def rounds(shards, make=lambda: Numbers(20), seeds=(0, 0, 0), passes=1):
    """The order of each pass over a new dataset in each round."""
    return [
        [drawn(shard(shards, DataLoader(data, 3, shuffle=True), seed)) for _ in range(passes)]
        for seed in seeds
        for data in [make()]
    ]


@pytest.mark.parametrize("make", [lambda: Numbers(20), lambda: list(torch.arange(20))])
@pytest.mark.parametrize("mode", MODES)
def test_a_new_dataset_in_each_round_has_another_order(make, mode):
    with MODES[mode]():
        passes = [*chain(*rounds(registry(), make, passes=2 if mode == "enabled" else 1))]
    assert len({str(order) for order in passes}) == len(passes)
    assert all(sorted(order) == list(range(20)) for order in passes)
    assert passes[0] == drawn(sharded(shuffled()))  # as ever


def test_the_order_of_rounds_is_the_same_on_all_ranks_and_in_each_job():
    peers = {"size": 2, "gather": lambda value: [value] * 2}
    two = [registry(SimpleNamespace(rank=rank, **peers)) for rank in (0, 1)]
    first, second = (rounds(shards) for shards in two)
    batches = [a + b for one, other in zip(first, second, strict=True) for a, b in [(*one, *other)]]
    alone = [order for [order] in rounds(registry())]
    assert [sorted(order) for order in batches] == [sorted(order) for order in alone]
    parts = [[], []]
    for order in alone:
        for number, part in enumerate(parts):
            part.append([n for low in range(0, 20, 3) for n in half(order[low : low + 3], number)])
    assert [[order for [order] in ranks] for ranks in (first, second)] == parts


def half(batch, rank):
    middle = len(batch) // 2
    return batch[:middle] if rank == 0 else batch[middle:]


def test_a_dataset_with_a_seed_of_its_own_has_the_order_of_that_seed():
    got = rounds(registry(), seeds=(5, 6, 7))
    assert got == [[drawn(sharded(shuffled(), seed=seed))] for seed in (5, 6, 7)]


def test_a_position_in_a_later_dataset_is_resumed_where_it_is_the_first():
    shards = registry()
    rounds(shards)
    fourth = shard(shards, shuffled())
    batches = iter(fourth)
    next(batches)
    state = fourth.state_dict()
    rest = [drawn(batches), drawn(fourth)]
    resumed = shard(registry(), shuffled())
    resumed.load_state_dict(state)
    assert [drawn(resumed), drawn(resumed)] == rest
    before = {name: state[name] for name in ("epoch", "batches", "stream", "generator")}
    resumed.load_state_dict(before)  # of a version whose datasets all had one order
    assert resumed.state_dict() == before
    assert [drawn(resumed), drawn(resumed)] == [drawn(sharded_at(0))[3:], drawn(sharded_at(1))]


# ---- positions, also behind the last batch of an epoch ----


class DrawingSampler(Sampler):
    """Draws its indices when they are asked for, from one of the default generators."""

    def __iter__(self):
        return (int(np.random.randint(21)) for _ in range(21))

    def __len__(self):
        return 21


class Buckets(Sampler):
    """Draws batches from a generator of its own, of torch or Python."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        if isinstance(self.generator, torch.Generator):
            places = torch.randperm(21, generator=self.generator).tolist()
        else:
            places = self.generator.sample(range(21), 21)
        return (places[start : start + 3] for start in range(0, 21, 3))

    def __len__(self):
        return 7


class Shuffles:
    """A hand-written loader, in the style of torch.randperm(n).split(b)."""

    def __iter__(self):
        return iter(torch.randperm(21).split(3))


def buckets(generator):
    return DataLoader(Numbers(21), batch_sampler=Buckets(generator))


LOADERS_OF_7 = {
    "shuffled": partial(shuffled, 21),
    "own generator": lambda: shuffled(21, generator=torch.Generator().manual_seed(5)),
    "own batches": lambda: buckets(torch.Generator().manual_seed(5)),
    "lazy sampler": lambda: DataLoader(Numbers(21), 3, sampler=DrawingSampler()),
    "workers": partial(shuffled, 21, num_workers=2, multiprocessing_context="fork"),
    "listed": lambda: list(DataLoader(Numbers(21), 3)),
    "derived": lambda: type("Derived", (DataLoader,), {})(Numbers(21), 3, shuffle=True),
    "hand-written": Shuffles,
    "stream": lambda: DataLoader(StreamWithLength(21), 3),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("kind", "done"),
    [
        (kind, done)
        for kind in LOADERS_OF_7
        for done in (0, 1, 3, 7, 9, 14)
        if kind != "hand-written" or done not in (7, 14)  # it has no length to tell its end
    ],
)
def test_a_pass_is_resumed_behind_any_batch_on_any_number_of_ranks(kind, size, done):
    epochs, steps = 3, 7
    make = LOADERS_OF_7[kind]
    whole = sharded(make())
    expected = [[batch.tolist() for batch in whole] for _ in range(epochs)]
    before = sharded(make())
    batches = chain.from_iterable(before for _ in range(epochs))
    for _ in range(done):
        next(batches)
    state = before.state_dict()
    first, begun = divmod(done, steps)
    for count in ("steps", "epoch"):
        ranks = []
        for rank in range(size):
            parts = sharded(make(), rank, size)
            parts.load_state_dict(state)
            assert parts.state_dict() == state
            start = first if count == "steps" else parts.epoch
            ranks.append([[b.tolist() for b in parts] for _ in range(start, epochs)])
            assert parts._shards.warnings == []
        together = [
            [list(chain(*parts)) for parts in zip(*epoch, strict=True)]
            for epoch in zip(*ranks, strict=True)
        ]
        assert together == [expected[first][begun:], *expected[first + 1 :]]


def test_a_resumed_pass_that_skips_other_batches_warns():
    before = sharded(buckets(random.Random(3)))
    drawn(before)
    begun = iter(before)
    next(begun)
    for make in (partial(buckets, random.Random(3)), partial(shuffled, 21), partial(shuffled, 28)):
        log = Log()
        resumed = sharded(make(), log=log)
        resumed.load_state_dict(before.state_dict())
        assert len(drawn(resumed)) == len(make().dataset) - 3
        (warning,) = log.warnings
        assert warning.startswith("epoch 1 goes on behind 1 batches, and these are not the ones")
        drawn(resumed)
        assert len(log.warnings) == 1


def test_a_balanced_loader_goes_on_with_the_next_epoch():
    def body(rank, gather):
        made = balancing_of(2, gather, Clock())
        passes = Passes(balance=made)
        parts = sharded(shuffled(), rank, 2, gather=gather, passes=passes, balance=True)
        batches = iter(parts)
        for _ in range(7):
            next(batches)
        state = parts.state_dict()
        expected = [drawn(parts) for _ in range(2)]
        parts.load_state_dict(state)
        return expected, [drawn(parts) for _ in range(2)]

    for expected, resumed in in_turns(2, body):
        assert resumed == expected


def test_the_first_batch_behind_the_end_of_an_epoch_is_compared():
    compared = []
    parts = sharded(shuffled(), 0, 2)
    state = {**parts.state_dict(), "batches": 7}
    log = Log()
    log.compare = compared.append
    parts = sharded(shuffled(), 0, 2, log, known=SimpleNamespace(compared=False))
    parts.load_state_dict(state)
    drawn(parts)
    assert [first.indices is None for first in compared] == [True, False]


class Longer(DataLoader):
    """Says that an epoch has fewer batches than it has."""

    def __len__(self):
        return 4


def test_batches_beyond_the_length_of_a_loader_are_not_lost():
    parts = sharded(Longer(Numbers(20), 3))
    batches = iter(parts)
    for _ in range(5):
        next(batches)
    parts.load_state_dict(parts.state_dict())
    assert drawn(parts) == [15, 16, 17, 18, 19]
    assert parts.epoch == 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_behind_the_end_of_a_stream_without_a_length_the_pass_is_empty(workers):
    method = {"multiprocessing_context": "fork"} if workers else {}
    parts = sharded(DataLoader(Stream(6), batch_size=3, num_workers=workers, **method))
    batches = iter(parts)
    next(batches), next(batches)
    state = parts.state_dict()
    parts.load_state_dict(state)
    assert parts.epoch == 0  # which `range(parts.epoch, epochs)` counts
    assert [drawn(parts) for _ in range(2)] == [[], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize(("divided", "runs"), [(False, [0, 9, 2, 4, 9, 1, 1, 2]), (True, [-1, 10])])
def test_the_record_of_a_pass_has_its_runs_of_equal_batches(divided, runs):
    log, gather = Log(), lambda value: [value] * 2
    list(sharded(DataLoader(Numbers(38), 4), 0, 2, log, divided=divided, batches=10, gather=gather))
    assert list(log.latest)[: len(runs)] == runs
    assert len(log.latest) == 4 * (2 - divided)
