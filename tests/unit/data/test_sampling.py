import random
from collections import namedtuple
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
)

from mntrain.data.loader import ShardedLoader
from mntrain.data.sampling import (
    LoaderOptions,
    SamplingPlan,
    batches,
    validation_batches,
)

PLANS = st.builds(
    SamplingPlan,
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 25),
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
)
SIZES = st.integers(1, 9)
WORKERS = [(0, "spawn"), (2, "fork")]
SPAWNED = (1, "spawn")  # seconds each: a spawned worker imports torch


class Numbers(Dataset):
    """Item i is i. At module level, for spawned workers."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor(index)


class Counting(Numbers):
    """Remembers what it was asked for."""

    def __init__(self, n):
        super().__init__(n)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return super().__getitem__(index)


def as_list_plus_one(samples):
    return [int(sample) + 1 for sample in samples]


# ---- the plan ----


@given(PLANS, st.integers(0, 3))
def test_an_epoch_takes_every_sample_once(plan, epoch):
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    drawn = [plan.indices(step) for step in steps]
    assert sorted(torch.cat(drawn).tolist()) == list(range(plan.samples))
    assert all(len(indices) == plan.batch_size for indices in drawn[:-1])
    assert 1 <= len(drawn[-1]) <= plan.batch_size
    assert all(indices.dtype == torch.int64 and indices.dim() == 1 for indices in drawn)


@given(PLANS, st.integers(0, 200), SIZES)
def test_shares_put_together_are_the_global_batch_at_any_size(plan, step, size):
    shares = [plan.share(step, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(shares), plan.indices(step))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1


@given(PLANS, st.integers(0, 200), SIZES, st.integers(1, 7))
def test_micro_batches_put_together_are_the_share(plan, step, size, micro_batch_size):
    for rank in range(size):
        pieces = plan.micro_batches(step, rank, size, micro_batch_size)
        assert list(chain.from_iterable(pieces)) == plan.share(step, rank, size).tolist()
        lengths = [len(piece) for piece in pieces]
        assert all(1 <= length <= micro_batch_size for length in lengths)
        assert max(lengths, default=0) - min(lengths, default=0) <= 1
        assert len(pieces) == -(-sum(lengths) // micro_batch_size)
        assert len(pieces) == plan.micro_batch_count(step, rank, size, micro_batch_size)


@given(PLANS, st.lists(st.integers(0, 200), min_size=1, max_size=8))
def test_steps_are_the_same_in_any_order_of_calls(plan, steps):
    first = {step: plan.indices(step) for step in steps}
    for step in reversed(steps):
        assert torch.equal(plan.indices(step), first[step])


def test_epochs_and_seeds_shuffle_differently_and_no_shuffle_keeps_the_order():
    plan = SamplingPlan(samples=100, batch_size=100, seed=0)
    orders = [plan.indices(0), plan.indices(1), SamplingPlan(100, 100, seed=1).indices(0)]
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert SamplingPlan(5, 2, seed=0, shuffle=False).indices(5).tolist() == [4]


def test_the_permutation_is_pinned():
    # A resumed job must go on in the order that it began with.
    assert SamplingPlan(samples=8, batch_size=8, seed=3).indices(1).tolist() == [
        0,
        5,
        1,
        7,
        3,
        2,
        4,
        6,
    ]


def test_writing_to_returned_indices_does_not_change_the_plan():
    plan = SamplingPlan(samples=10, batch_size=4, seed=0)
    before = plan.indices(1).tolist()
    plan.indices(1).zero_()
    plan.share(1, 0, 1).zero_()
    assert plan.indices(1).tolist() == before


def test_a_plan_leaves_torchs_random_state_alone():
    state = torch.get_rng_state()
    SamplingPlan(samples=11, batch_size=4, seed=5).indices(7)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        SamplingPlan(samples=0, batch_size=1, seed=0)


# ---- loading by the plan ----


@pytest.mark.parametrize(
    ("size", "workers", "start_method"),
    [*((size, *how) for size in (1, 3, 11) for how in WORKERS), (3, *SPAWNED)],
)
def test_batches_are_the_plans_micro_batches_over_epochs(size, workers, start_method):
    plan = SamplingPlan(samples=23, batch_size=9, seed=1)
    rank, start, stop = size - 1, 2, 7
    got = batches(
        Numbers(plan.samples),
        plan,
        LoaderOptions(
            rank=rank, size=size, micro_batch_size=2, workers=workers, start_method=start_method
        ),
        range(start, stop),
    )
    expected = [plan.micro_batches(step, rank, size, 2) for step in range(start, stop)]
    assert [[piece.tolist() for piece in pieces] for pieces in got] == expected


class Augmented(Dataset):
    """Item i is i, and what each of the default generators draws for it."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index, random.random(), np.random.random(), torch.rand(2).tolist()


def drawn(size, start, stop, workers, micro_batch_size):
    """What all ranks draw for their samples, by step and sample."""
    plan = SamplingPlan(23, batch_size=7, seed=5)
    found = {}
    for rank in range(size):
        options = LoaderOptions(
            rank=rank,
            size=size,
            micro_batch_size=micro_batch_size,
            workers=workers,
            start_method="fork",
            collate=list,
        )
        steps = batches(Augmented(23), plan, options, range(start, stop))
        for step, micro_batches in enumerate(steps, start):
            for samples in micro_batches:
                found |= {(step, one[0]): one[1:] for one in samples}
    return found


def test_random_draws_of_a_sample_do_not_depend_on_the_loading_rank():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    whole = drawn(size=1, start=0, stop=8, workers=0, micro_batch_size=7)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == states
    assert len({str(one) for one in whole.values()}) == len(whole) == 2 * 23
    for size, start, workers, micro_batch_size in ((3, 0, 0, 2), (2, 3, 0, 1), (1, 5, 2, 3)):
        part = drawn(size, start, 8, workers, micro_batch_size)
        assert part == {key: one for key, one in whole.items() if key[0] >= start}


@pytest.mark.parametrize(("workers", "start_method"), WORKERS)
def test_a_rank_without_samples_gets_empty_steps(workers, start_method):
    got = batches(
        Numbers(4),
        SamplingPlan(samples=4, batch_size=1, seed=0),
        LoaderOptions(
            rank=0, size=2, micro_batch_size=3, workers=workers, start_method=start_method
        ),
        range(3),
    )
    assert list(got) == [[], [], []]


@pytest.mark.parametrize(("workers", "start_method"), WORKERS)
def test_validation_visits_the_whole_dataset_once(workers, start_method):
    seen = []
    for rank in range(3):
        options = LoaderOptions(
            rank=rank,
            size=3,
            micro_batch_size=2,
            workers=workers,
            start_method=start_method,
            collate=as_list_plus_one,
        )
        seen.append(list(validation_batches(Numbers(13), options)))
    assert all(len(piece) <= 2 for pieces in seen for piece in pieces)
    numbers = [number for pieces in seen for piece in pieces for number in piece]
    assert sorted(numbers) == list(range(1, 14))
    assert [len(pieces) for pieces in seen] == [2, 2, 3]


def test_a_dataset_that_fetches_many_samples_at_once_does_so():
    class Fetching(Dataset):
        def __len__(self):
            return 12

        def __getitems__(self, indices):
            return [torch.tensor([index, len(indices)]) for index in indices]

    plan = SamplingPlan(12, 6, seed=0)
    options = LoaderOptions(rank=0, size=1, micro_batch_size=3)
    got = [batch for step in batches(Fetching(), plan, options, range(2)) for batch in step]
    assert sorted(i for batch in got for i in batch[:, 0].tolist()) == list(range(12))
    assert {count for batch in got for count in batch[:, 1].tolist()} == {3}


def test_loading_leaves_torchs_random_state_alone():
    state = torch.get_rng_state()
    options = LoaderOptions(rank=0, size=1, micro_batch_size=2, workers=1, start_method="fork")
    list(batches(Numbers(4), SamplingPlan(4, 2, seed=0), options, range(2)))
    assert torch.equal(torch.get_rng_state(), state)


# ---- sharding of a user's loader ----

Pair = namedtuple("Pair", "x y")


@dataclass
class Named:
    x: torch.Tensor
    scale: float


def epoch_of(loader, rank, size, seed=0, epoch=0):
    """One rank's epoch, as (what it got, its share) a batch."""
    shares = []
    parts = ShardedLoader(loader, rank, size, seed, shares.append)
    parts.epoch = epoch
    got = [(batch, shares[-1]) for batch in parts]
    assert shares == [*(share for _, share in got), None]
    return got


def concatenated(loader, size, **options):
    """The global batches, from all ranks' parts of two tensors; checks the stand-ins."""
    ranks = [epoch_of(loader, rank, size, **options) for rank in range(size)]
    whole = []
    for parts in zip(*ranks, strict=True):
        shares = [share for _, share in parts]
        assert max(shares) - min(shares) <= 1
        assert all(len(x) == max(1, share) for (x, _), share in parts)
        own = [part for part, share in parts if share]
        whole.append([torch.cat(column) for column in zip(*own, strict=True)])
        assert all(bool(torch.isin(x, whole[-1][0]).all()) for (x, _), _ in parts)
    return whole


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": True, "drop_last": True}, {}])
def test_the_parts_of_a_loader_are_the_global_batches(size, options):
    data = TensorDataset(torch.arange(18), torch.arange(18) * 2)
    loader = DataLoader(data, batch_size=4, **options)
    with torch.random.fork_rng(devices=[]):
        whole = concatenated(loader, size)
    assert [len(x) for x, _ in whole] == ([4] * 4 if options.get("drop_last") else [4] * 4 + [2])
    assert all(torch.equal(y, 2 * x) for x, y in whole)
    drawn = torch.cat([x for x, _ in whole]).tolist()
    assert len(set(drawn)) == len(drawn)
    assert (drawn == sorted(drawn)) == ("shuffle" not in options)


@pytest.mark.parametrize(("workers", "start_method"), [*WORKERS, SPAWNED])
def test_the_ranks_agree_though_their_random_states_differ(workers, start_method):
    data = TensorDataset(torch.arange(10), torch.arange(10))
    loader = DataLoader(
        data,
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=start_method if workers else None,
    )
    drawn = []
    for rank in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(rank)
            before = torch.get_rng_state()
            drawn.append([x for (x, _), _ in epoch_of(loader, rank, 2, seed=7)])
            assert torch.equal(torch.get_rng_state(), before)
    assert [len(x) for x in drawn[0]] == [len(x) for x in drawn[1]] == [2, 2, 1]
    assert sorted(torch.cat([*drawn[0], *drawn[1]]).tolist()) == list(range(10))


def test_each_iteration_is_an_epoch_with_an_order_of_its_own():
    loader = DataLoader(Numbers(20), batch_size=20, shuffle=True)
    parts = ShardedLoader(loader, 0, 1, 0, lambda n: None)
    first, second = [[batch.tolist() for batch in parts] for _ in range(2)]
    assert first != second
    parts.epoch = 1
    assert [batch.tolist() for batch in parts] == second
    assert [batch.tolist() for batch, _ in epoch_of(loader, 0, 1, epoch=0)] == first
    assert [batch.tolist() for batch, _ in epoch_of(loader, 0, 1, seed=1)] != first


def test_a_rank_loads_only_its_own_samples():
    data = Counting(12)
    for batch, share in epoch_of(DataLoader(data, batch_size=5), rank=1, size=2):
        assert len(batch) == share
    assert data.asked == [2, 3, 4, 7, 8, 9, 11]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stand_in_comes_with_a_share_of_zero(workers):
    loader = DataLoader(
        Numbers(7),
        batch_size=5,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    got = epoch_of(loader, rank=0, size=4)
    assert [(batch.tolist(), share) for batch, share in got] == [([0], 1), ([5], 0)]
    got = epoch_of(loader, rank=1, size=4)
    assert [(batch.tolist(), share) for batch, share in got] == [([1], 1), ([5], 1)]


def test_the_share_matches_the_yielded_batch_while_workers_load_ahead():
    loader = DataLoader(
        Numbers(31),
        batch_sampler=UnevenBatches(),
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    shares = []
    parts = ShardedLoader(loader, 0, 2, 0, shares.append)
    for _ in range(2):  # the second time after one broken off
        for batch in parts:
            assert len(batch) == shares[-1]
            if len(shares) == 2:
                break
    assert shares == [1, 2, None, *(n // 2 for n in UnevenBatches.SIZES), None]


class UnevenBatches(Sampler):
    SIZES = (2, 4, 10, 6, 8)

    def __iter__(self):
        start = 0
        for n in self.SIZES:
            yield range(start, start + n)
            start += n

    def __len__(self):
        return len(self.SIZES)


class RandomDraws(Sampler):
    """Draws at each step, unlike torch's RandomSampler, which seeds itself at the first."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for _ in range(self.n):
            yield int(torch.randint(self.n, (1,)))

    def __len__(self):
        return self.n


def test_a_sampler_that_draws_lazily_continues_its_own_random_stream():
    loader = DataLoader(Numbers(50), batch_sampler=BatchSampler(RandomDraws(50), 5, False))
    drawn = []
    for rank in range(2):
        values = []
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(rank)
            for batch, _ in epoch_of(loader, 0, 1):
                values.append(batch.tolist())
                torch.rand(1 + rank)  # what training draws in between
        drawn.append(values)
    assert drawn[0] == drawn[1]
    assert len({tuple(batch) for batch in drawn[0]}) > 1


def test_the_loaders_own_collate_function_is_kept():
    loader = DataLoader(Numbers(4), batch_size=4, collate_fn=as_list_plus_one)
    assert epoch_of(loader, rank=1, size=2) == [([3, 4], 2)]


def test_length_is_the_loaders():
    loader = DataLoader(Numbers(10), batch_size=4)
    assert len(ShardedLoader(loader, 0, 3, 0, lambda n: None)) == 3
    assert len(ShardedLoader([torch.zeros(2)] * 5, 0, 3, 0, lambda n: None)) == 5
    with pytest.raises(TypeError):
        len(ShardedLoader(iter([torch.zeros(2)]), 0, 3, 0, lambda n: None))


# ---- sliced batches ----


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_iterable_of_batches_is_sliced(size):
    source = [
        (torch.arange(start, stop), -torch.arange(start, stop))
        for start, stop in [(0, 4), (4, 5), (5, 12)]
    ]
    whole = concatenated(source, size)
    for got, given_ in zip(whole, source, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, given_, strict=True))


def test_nested_batches_are_sliced_and_keep_their_types():
    x = torch.arange(5)
    batch = {
        "pair": Pair(x, [x + 1, x.numpy()]),
        "named": Named(x[:, None], 0.5),
        "words": ["a", "b", "c", "d", "e"],
        "scalar": torch.tensor(3.0),
        "note": "all",
    }
    [(got, share)] = epoch_of([batch], rank=1, size=2)
    assert share == 3
    assert type(got["pair"]) is Pair
    assert got["pair"].x.tolist() == got["named"].x[:, 0].tolist() == [2, 3, 4]
    assert got["pair"].y[0].tolist() == [3, 4, 5]
    assert isinstance(got["pair"].y[1], np.ndarray)
    assert got["pair"].y[1].tolist() == [2, 3, 4]
    assert got["named"].scale == 0.5
    assert got["words"] == ["c", "d", "e"]
    assert (got["scalar"].item(), got["note"]) == (3.0, "all")
    assert len(batch["words"]) == len(batch["pair"].x) == 5


def test_a_short_batch_is_sliced_with_a_stand_in():
    got = [epoch_of([torch.tensor([7, 8])], rank, 3)[0] for rank in range(3)]
    assert [(batch.tolist(), share) for batch, share in got] == [([7], 0), ([7], 1), ([8], 1)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Reversed(DataLoader):
    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(Stream(), batch_size=4), [[2, 3], [6, 7], [9]]),
        (Reversed(Numbers(10), batch_size=4), [[9], [6, 7], [2, 3]]),
        (DataLoader(TensorDataset(torch.arange(6).view(2, 3)), batch_size=None), [[1, 2], [4, 5]]),
    ],
    ids=["iterable dataset", "subclass with its own order", "no batch sampler"],
)
def test_loaders_without_a_batch_sampler_are_sliced(loader, expected):
    got = [batch for batch, _ in epoch_of(loader, rank=1, size=2)]
    assert [(x[0] if isinstance(x, tuple | list) else x).tolist() for x in got] == expected


class Shuffled:
    """A hand-written loader, in the style of torch.randperm(n).split(b)."""

    def __iter__(self):
        return iter(torch.randperm(10).split(4))


def test_ranks_agree_on_hand_written_loaders_that_draw():
    drawn = []
    for rank in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(rank)
            drawn += [batch for batch, _ in epoch_of(Shuffled(), rank, 2)]
    assert sorted(torch.cat(drawn).tolist()) == list(range(10))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4), torch.zeros(3)), r"tensors of one length .* this tuple has \[3, 4\]"),
        ({"a": 1}, "this dict has no tensors"),
        (torch.zeros(0, 3), "no samples"),
    ],
)
def test_batches_that_cannot_be_sliced_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        epoch_of([batch], 0, 2)


def test_a_loader_that_is_sharded_already_is_refused():
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=0)
    loader = DataLoader(Numbers(8), batch_size=2, sampler=sampler)
    with pytest.raises(ValueError, match="DistributedSampler"):
        ShardedLoader(loader, 0, 2, 0, lambda n: None)


def test_weighted_shares_and_stand_ins_give_the_exact_mean():
    data = TensorDataset(torch.randn(7, 3, generator=torch.Generator().manual_seed(0)))
    loader = DataLoader(data, batch_size=5)
    whole = [batch.mean() for (batch,) in loader]
    size = 4
    ranks = [epoch_of(loader, rank, size) for rank in range(size)]
    for mean, parts in zip(whole, zip(*ranks, strict=True), strict=True):
        weighed = sum(batch.mean() * share for (batch,), share in parts)
        torch.testing.assert_close(weighed / sum(share for _, share in parts), mean)
