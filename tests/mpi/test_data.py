"""Loops over `world.shard`: epochs, weights, evaluation, streams, and data divided before."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from models import net
from mpi4py import MPI
from oracle import SGD, PlainTraining, assert_parity, loss_of, modes, samples, train_alike, update
from sharding import sharded
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    get_worker_info,
)
from worlds import make_world, refusal

pytestmark = pytest.mark.simulated

RANKS, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
WithWorkers = partial(DataLoader, multiprocessing_context="fork")
WHOLE = TensorDataset(*samples(24))
MINE = range(RANK, 24, RANKS)
ALL_SAMPLES = [WHOLE[i] for i in range(24)]
MY_SAMPLES = [WHOLE[i] for i in MINE]
STAGES = pytest.mark.parametrize("stage", [0, 2])


def together(world, batch, own=None):
    """The batch of all ranks, of which the first `own` samples are this rank's."""
    parts = world.gather([column[:own] for column in batch])
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def with_oracle(make, stage=0):
    """An optimizer, its model, and the oracle."""
    model = net()
    return make(model, SGD, stage=stage), model, PlainTraining(model, SGD)


def token_loss(model, batch):
    """The loss of all tokens but the padding, whose target is -1."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-1)


def padded(n):
    """Sequences of 6 inputs and targets, of which each has another number of tokens."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(n, 6, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (n, 6), generator=generator)
    lengths = torch.arange(n) * 5 % 7
    targets[torch.arange(6) >= lengths[:, None]] = -1
    return inputs, targets


def tokens(batch):
    return int((batch[1] >= 0).sum())


@modes
def test_a_weight_gives_the_exact_mean_over_tokens(world, make, mode):
    """It takes the place of the loader's share."""
    torch.manual_seed(5)
    model = nn.Linear(5, 3).double()
    alone = PlainTraining(model, SGD)
    loader = DataLoader(TensorDataset(*padded(20)), batch_size=9, shuffle=True)
    optimizer = make(model, SGD, **mode)
    whole = sharded(loader)
    parts = world.shard(loader, weight=tokens)
    for _ in range(2):
        for batch, global_batch in zip(parts, whole, strict=True):
            result = update(optimizer, token_loss(model, batch))
            assert result.weight == tokens(global_batch)
            alone.step(token_loss(alone.model, global_batch))
    assert_parity(world, model, alone)


@pytest.mark.parametrize(
    ("value", "weight", "words"),
    [
        *((1.0, weight, f"weight is {weight!r}: give a f") for weight in (-1, math.nan, "9")),
        ("a", 1.0, "the value is 'a': give a number or a tensor"),
        ([1, 2], 1.0, "the value is [1, 2]"),
    ],
)
def test_what_has_no_mean_is_refused_on_all_ranks(world, value, weight, words):
    given = (value, weight) if RANK == RANKS - 1 else (1.0, 1.0)
    assert refusal(world.mean, *given).startswith(f"world.mean: rank {RANKS - 1}: {words}")
    assert refusal(world.mean, 1.0, 0) == "world.mean: the weights of all ranks are 0"


class OwnStreams(IterableDataset):
    """Each reader has samples of its own: the last one none, the others unlike numbers."""

    def __iter__(self):
        info = get_worker_info()
        n = 0 if info.id == info.num_workers - 1 > 0 else 3 + 4 * info.id
        yield from zip(*samples(n, seed=info.id), strict=True)


@STAGES
def test_streams_of_unequal_length_train_on_every_sample(world, make, stage):
    optimizer, model, alone = with_oracle(make, stage)
    loader = DataLoader(OwnStreams(), batch_size=2 * RANKS)
    parts, seen = world.shard(loader), 0
    for _ in range(2):
        own = iter(sharded(loader, RANK, RANKS, gather=lambda value: [value] * RANKS))
        for batch in parts:
            mine = next(own, None)
            stand_in = [column[:0] for column in batch]
            whole = together(world, mine if mine else stand_in)
            seen += len(whole[0])
            train_alike(optimizer, model, alone, [(batch, whole)])
    assert seen == 2 * sum(3 + 4 * i for i in range(RANKS - 1))
    assert_parity(world, model, alone)


class OwnGenerator(Sampler):
    """Shuffles by a generator that differs between ranks, but for the first passes."""

    def __init__(self, alike):
        self.alike = alike

    def __iter__(self):
        self.alike -= 1
        generator = torch.Generator().manual_seed(0 if self.alike >= 0 else RANK)
        yield from torch.randperm(14, generator=generator).tolist()

    def __len__(self):
        return 14


@STAGES
def test_ranks_whose_samplers_draw_unlike_indices_are_told_so(world, make, stage):
    model = net()
    optimizer = make(model, SGD, stage=stage)
    data = TensorDataset(*samples(14))
    words = "different samples for one global batch"
    loader = DataLoader(data, batch_size=7, sampler=OwnGenerator(alike=0))
    assert words in refusal(next, iter(world.shard(loader)))
    loader = DataLoader(data, batch_size=7, sampler=OwnGenerator(alike=1))
    next(iter(world.shard(loader)))

    def step():
        loss_of(model, batch).backward()
        optimizer.step()

    batch = next(iter(world.shard(loader)))  # ranks compare the first pass over a loader only
    with pytest.raises(RuntimeError, match=words):
        step()


@STAGES
@pytest.mark.parametrize("kind", ["indices", "list", "stream"])
def test_a_batch_that_one_rank_leaves_out_is_an_error_in_the_next_step(world, make, stage, kind):
    model = net()
    optimizer = make(model, SGD, stage=stage)
    loader = DataLoader(Repeated(ALL_SAMPLES) if kind == "stream" else WHOLE, batch_size=6)
    batches = iter(world.shard([*map(tuple, loader)] if kind == "list" else loader, train=True))
    loss_of(model, next(batches)).backward()
    optimizer.step()
    if RANK == 1:
        next(batches)  # as behind a loss that is not finite
        optimizer.forget_batches()
    with pytest.raises(RuntimeError, match="leave out a batch"):
        loss_of(model, next(batches)).backward()


@STAGES
def test_two_models_have_loaders_of_unlike_batches(world, make, stage):
    trained = [with_oracle(make, stage) for _ in range(2)]
    loaders = [DataLoader(TensorDataset(*samples(n)), batch_size=n // 3) for n in (23, 11)]
    for _ in zip(*[zip(world.shard(each), each, strict=True) for each in loaders], strict=True):
        break  # draws a batch of both at once: they are dropped with the passes
    parts = [iter(world.shard(each)) for each in loaders]
    for wholes in zip(*loaders, strict=True):
        for each, part, whole in zip(trained, parts, wholes, strict=True):
            train_alike(*each, [(next(part), whole)])
    for _, model, alone in trained:
        assert_parity(world, model, alone)


class Repeated(IterableDataset):
    """All its samples in every reader; `change` is applied to each."""

    def __init__(self, data, change=lambda sample: sample):
        self.samples, self.change = data, change

    def __iter__(self):
        return map(self.change, self.samples)


class Files(Repeated):
    """The files of a reader, of one sample each."""

    def __iter__(self):
        info = get_worker_info()
        return map(self.change, self.samples[info.id :: info.num_workers])


class OnePass(IterableDataset):
    """An iterator that is used up, as that over a socket."""

    def __init__(self, samples):
        self.samples = iter(samples)

    def __iter__(self):
        return self.samples


class Changed(Dataset):
    """A map-style dataset whose samples are changed."""

    def __init__(self, data, change):
        self.data, self.change = data, change

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.change(self.data[index])


class Batches:
    """An iterable of batches without a length."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return iter(self.make())


def augmented(sample):
    """Change inputs by a generator that no seed reaches."""
    return sample[0] + float(np.random.default_rng().normal()), sample[1]


def flipped(sample):
    """Change inputs by the default generator of torch, in some of the draws."""
    return (-sample[0] if torch.rand(()) < 0.5 else sample[0]), sample[1]


def unlabelled(sample):
    return augmented(sample)[0]


def batches_of(data, size=3):
    return list(DataLoader(data, batch_size=size))


DIVIDED = {
    "subset": lambda: DataLoader(Subset(WHOLE, MINE), batch_size=4, shuffle=True),
    "augmented subset": lambda: DataLoader(Subset(Changed(WHOLE, augmented), MINE), batch_size=9),
    "lengths": lambda: DataLoader(Subset(WHOLE, range(12 + RANK)), batch_size=4),
    "sampler": lambda: DataLoader(WHOLE, batch_size=4, sampler=MINE),
    "batches": lambda: batches_of(WHOLE)[RANK::RANKS],
    "iterable": lambda: Batches(lambda: batches_of(Subset(WHOLE, MINE))),
    "iterator": lambda: iter(batches_of(Subset(WHOLE, MINE))),
    "stream with workers": lambda: WithWorkers(Repeated(MY_SAMPLES), batch_size=4, num_workers=2),
    "augmented stream": lambda: DataLoader(Repeated(MY_SAMPLES, augmented), batch_size=9),
    "files": lambda: DataLoader(Files(MY_SAMPLES), batch_size=4),
    "a rank without files": lambda: DataLoader(Files(MY_SAMPLES[: 9 * RANK]), batch_size=4),
    "tensors": lambda: DataLoader(torch.arange(9.0) + RANK, batch_size=4),
    "names": lambda: DataLoader([f"/data{RANK}/{i}-{RANK}.png" for i in range(9)], batch_size=4),
}

EQUAL = {
    "unlabelled": lambda: DataLoader(Changed(WHOLE, unlabelled), batch_size=4),
    "flipped": lambda: DataLoader(Changed(WHOLE, flipped), batch_size=4, shuffle=True),
    "flipped stream": lambda: DataLoader(Repeated(ALL_SAMPLES, flipped), batch_size=4),
    "used up stream": lambda: DataLoader(OnePass(ALL_SAMPLES), batch_size=4),
    "files": lambda: WithWorkers(Files(ALL_SAMPLES), batch_size=4, num_workers=2),
    "mounted elsewhere": lambda: DataLoader([f"/data{RANK}/{i}.png" for i in range(9)]),
    "no samples": lambda: DataLoader(TensorDataset(torch.empty(0, 3)), batch_size=4),
    "rounding": lambda: DataLoader(torch.rand(9, generator=torch.Generator()) + 1e-7 * RANK),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_data_that_were_divided_before_are_refused_at_the_first_batch(world, name):
    for training in (True, False):  # an evaluation would be of a part of the data
        with torch.set_grad_enabled(training):
            assert "divided=True" in refusal(next, iter(world.shard(DIVIDED[name]())), None)


@pytest.mark.parametrize("name", EQUAL)
def test_equal_data_are_not_refused_whatever_is_random_in_them(world, name):
    for train in (True, False):
        batches = world.gather(len(list(world.shard(EQUAL[name](), train=train))))
        assert any(batches) == (name != "no samples")
        assert not train or batches == batches[:1] * RANKS  # an evaluation has no empty ones


@pytest.mark.parametrize("kind", ["stream", "batches"])
def test_data_without_indices_that_differ_from_a_later_pass_on_are_refused(world, kind):
    begun = []

    def samples_of_rank():  # the first pass in order, each later one in an order of the rank
        begun.append(None)
        return np.roll(range(8), RANK * (len(begun) > 2)).tolist()

    class NumberStream(IterableDataset):
        def __iter__(self):
            return iter(samples_of_rank())

    batches = Batches(lambda: torch.tensor(samples_of_rank()).split(4))
    shard = world.shard(DataLoader(NumberStream(), batch_size=4) if kind == "stream" else batches)
    for _ in range(2):
        assert sorted(np.concatenate(world.gather(torch.cat(list(shard)).numpy()))) == [*range(8)]
    assert "divided=True" in refusal(next, iter(shard), None)


def my_part(seed=2):
    """Unlike numbers of samples: the first rank has fewest, of four the last none."""
    return samples(3 + 4 * RANK if RANK < 3 else 0, seed)


def own_loaders():
    part = my_part()
    data = TensorDataset(*part)
    size = 2 + RANK
    rows = list(zip(*part, strict=True))
    return {
        "map": DataLoader(data, batch_size=size, shuffle=bool(len(data))),
        "workers": WithWorkers(data, batch_size=size, num_workers=1),
        "stream": DataLoader(Repeated(rows), batch_size=size),
        "readers": WithWorkers(Files(rows), batch_size=size, num_workers=2),
        "batches": [tuple(c[i : i + size] for c in part) for i in range(0, len(part[0]), size)],
    }


@pytest.mark.parametrize("kind", ["map", "workers", "stream", "readers", "batches"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_divided_loaders_train_as_one_process_on_all_parts(world, make, stage, kind):
    optimizer, model, alone = with_oracle(make, stage)
    loader, seen, own_seen = own_loaders()[kind], [], 0
    total = sum(world.gather(len(my_part()[0])))
    for _ in range(2):
        before = len(seen)
        parts = world.shard(loader, divided=True)
        for batch in parts:
            own = parts.sizes[0]
            assert own in (0, len(batch[0]))
            own_seen += own
            whole = together(world, batch, own)
            seen += whole[0][:, 0].tolist()
            train_alike(optimizer, model, alone, [(batch, whole)])
        assert len(seen) - before == total
    everything = torch.cat([part[0][:, 0] for part in world.gather(my_part())])
    assert sorted(seen) == sorted(2 * everything.tolist())
    assert own_seen == 2 * len(my_part()[0])
    assert_parity(world, model, alone)


def test_a_divided_evaluation_sees_each_sample_once(world):
    with torch.no_grad():
        seen = [x for x, _ in world.shard(own_loaders()["map"], divided=True)]
    assert sum(map(len, seen)) == len(my_part()[0])


def test_a_divided_loader_may_have_a_distributed_sampler(world):
    sampler = DistributedSampler(WHOLE, num_replicas=RANKS, rank=RANK)
    shard = world.shard(DataLoader(WHOLE, batch_size=2, sampler=sampler), divided=True)
    seen = {int(i) for x, _ in shard for i in x[:, 0] * 1e6}
    seen = set().union(*world.gather(seen))
    assert seen == {int(i) for i in WHOLE.tensors[0][:, 0] * 1e6}


def test_the_length_is_that_of_the_longest_divided_loader(world):
    shard = world.shard(own_loaders()["map"], divided=True, train=True)
    longest = max(world.gather(len(own_loaders()["map"])))
    assert len(shard) == sum(1 for _ in shard) == longest
    with pytest.raises(TypeError):
        len(world.shard(own_loaders()["stream"], divided=True))


@pytest.mark.parametrize("kind", ["map", "stream", "readers", "batches"])
def test_a_divided_pass_is_resumed_on_as_many_ranks(world, kind):
    made = [world.shard(own_loaders()[kind], seed=5, divided=True, train=True) for _ in range(2)]
    shard, first = made
    begin = shard.state_dict()
    whole = [batch[0].tolist() for batch in shard]
    for done in (1, len(whole) - 1):
        first.load_state_dict(begin)
        parts = iter(first)
        for _ in range(done):
            next(parts)
        state = first.state_dict()
        assert world.gather(state) == [state] * RANKS
        resumed = world.shard(own_loaders()[kind], seed=5, divided=True, train=True)
        resumed.load_state_dict(state)
        rest = [(batch[0].tolist(), resumed.sizes[0]) for batch in resumed]
        assert len(rest) == len(whole) - done
        own = [batch for batch, weight in rest if weight]
        assert own == whole[done : done + len(own)]
    state["stream"] = {"divided": [None] * (RANKS + 1)}
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match=f"on {RANKS + 1} ranks"):
        next(iter(resumed))


def test_ranks_that_disagree_about_divided_are_told_so(world):
    loader = DataLoader(WHOLE, batch_size=4)

    def draw():
        return next(iter(world.shard(loader, divided=RANK == 0)))

    assert "divided of world.shard differs between ranks" in refusal(draw)


def test_divided_with_balance_is_refused(world):
    with pytest.raises(ValueError, match="leave one of the two out"):
        world.shard(DataLoader(WHOLE), balance=True, divided=True)


def test_a_divided_loader_and_another_have_no_common_weight(world, make):
    model = net()
    make(model, SGD)
    both = world.shard(own_loaders()["map"], divided=True), world.shard(batches_of(WHOLE, 8))
    pair = [next(iter(shard)) for shard in both]
    with pytest.raises(RuntimeError, match="divided=True gives a rank another part of each"):
        sum(loss_of(model, batch) for batch in pair).backward()


def test_batches_of_a_world_without_an_optimizer_are_refused_beside_another_world(world):
    batches = DataLoader(TensorDataset(torch.ones(5, 5)), 2)
    list(world.shard(batches, train=True))  # nothing is trained
    with make_world() as other:
        other.optimizer(net(), SGD)
        with pytest.raises(ValueError, match=r"call mntrain\.init\(\) once and pass the world on"):
            list(world.shard(batches, train=True))
        list(world.shard(batches, train=False))
        list(other.shard(batches, train=True))
    list(world.shard(batches, train=True))


def test_batches_that_optimizers_of_another_world_alone_train_are_refused(world, make):
    model, other_model = net(), net()
    optimizer = make(model, SGD)
    batches = DataLoader(TensorDataset(*samples(2 * RANKS + 1)), RANKS)

    def train(shard):
        for batch in shard:
            update(of_other, loss_of(other_model, batch))

    with make_world() as other:
        of_other, own = other.optimizer(other_model, SGD), samples(4, seed=RANK)
        for batch in world.shard(batches):  # beside data of its own
            update(of_other, loss_of(other_model, own))
            update(optimizer, loss_of(model, batch))
        for batch in world.shard(batches, train=True):
            of_other.share(len(batch[0]))
            update(of_other, loss_of(other_model, batch))
        list(world.shard(batches, train=True))  # drawn ahead
        with pytest.raises(ValueError, match="no optimizer of this world has trained a batch"):
            train(world.shard(batches, train=True))
