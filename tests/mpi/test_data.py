"""Loops over `world.shard`: epochs, weights, batches drawn ahead, evaluation, streams."""

import math

import pytest
import torch
from models import net
from mpi4py import MPI
from oracle import SGD, Alone, assert_parity, loss_of, modes, samples
from sharding import sharded
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, get_worker_info
from worlds import refusal

pytestmark = pytest.mark.mpi

RANKS, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
STAGES = pytest.mark.parametrize("stage", [0, 2])


def together(world, batch):
    """The batch of all ranks."""
    return [torch.cat(column) for column in zip(*world.gather(batch), strict=True)]


def drawn_ahead(batches):
    """Each batch after the next one was drawn, as prefetchers to a device do."""
    batches = iter(batches)
    ahead = next(batches)
    for following in batches:
        yield ahead
        ahead = following
    yield ahead


def test_a_shard_for_each_epoch_shuffles_each_anew(world):
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=6, shuffle=True)
    alone = sharded(loader)
    orders = []
    for _ in range(3):
        whole = [together(world, batch)[0].tolist() for batch in world.shard(loader)]
        assert whole == [batch.tolist() for [batch] in alone]
        orders.append(whole)
    assert orders[0] != orders[1] != orders[2] != orders[0]


@STAGES
def test_batches_drawn_ahead_keep_their_shares(world, make, stage):
    model = net()
    alone = Alone(model, SGD)
    loader = DataLoader(TensorDataset(*samples(21)), batch_size=7)
    optimizer = make(model, SGD, stage=stage)
    for _ in range(2):
        pairs = zip(drawn_ahead(world.shard(loader)), loader, strict=True)
        for batch, whole in pairs:
            loss_of(model, batch).backward()
            assert optimizer.step().weight == 7
            optimizer.zero_grad()
            alone.step(loss_of(alone.model, whole))
    assert_parity(world, model, alone)


def test_one_batch_may_be_trained_after_its_iterator_is_gone(world, make):
    model = net()
    alone = Alone(model, SGD)
    loader = DataLoader(TensorDataset(*samples(7)), batch_size=7)
    optimizer = make(model, SGD)
    batch = next(iter(world.shard(loader)))
    loss_of(model, batch).backward()
    assert optimizer.step().weight == 7
    alone.step(loss_of(alone.model, samples(7)))
    assert_parity(world, model, alone)


def token_loss(model, batch, reduction="mean"):
    """The loss of all tokens but the padding, whose target is -1."""
    inputs, targets = batch
    return functional.cross_entropy(
        model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction
    )


def padded(n):
    """Sequences of 6 inputs and targets, of which each has another number of tokens."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(n, 6, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (n, 6), generator=generator)
    lengths = torch.arange(n) * 5 % 7
    targets[torch.arange(6) >= lengths[:, None]] = -1
    return inputs, targets


@modes
def test_a_weight_gives_the_exact_mean_over_tokens(world, make, mode):
    torch.manual_seed(5)
    model = nn.Linear(5, 3).double()
    alone = Alone(model, SGD)
    loader = DataLoader(TensorDataset(*padded(20)), batch_size=9, shuffle=True)
    optimizer = make(model, SGD, **mode)
    whole = sharded(loader)
    parts = world.shard(loader, weight=lambda batch: int((batch[1] >= 0).sum()))
    for _ in range(2):
        for batch, global_batch in zip(parts, whole, strict=True):
            token_loss(model, batch).backward()
            assert optimizer.step().weight == int((global_batch[1] >= 0).sum())
            optimizer.zero_grad()
            alone.step(token_loss(alone.model, global_batch))
    assert_parity(world, model, alone)


@STAGES
def test_a_weighted_backward_takes_the_place_of_the_loaders_share(world, make, stage):
    torch.manual_seed(5)
    model = nn.Linear(5, 3).double()
    alone = Alone(model, SGD)
    loader = DataLoader(TensorDataset(*padded(20)), batch_size=9)
    optimizer = make(model, SGD, stage=stage)
    for batch, whole in zip(world.shard(loader), loader, strict=True):
        optimizer.backward(token_loss(model, batch), weight=int((batch[1] >= 0).sum()))
        assert optimizer.step().weight == int((whole[1] >= 0).sum())
        optimizer.zero_grad()
        alone.step(token_loss(alone.model, whole))
    assert_parity(world, model, alone)


@pytest.mark.parametrize("listed", [False, True])
def test_an_evaluation_is_exact_and_leaves_training_alone(world, make, listed):
    model = net()
    optimizer = make(model, SGD)
    alone = Alone(model, SGD)
    data = samples(RANKS + 3)
    loader = DataLoader(TensorDataset(*data), batch_size=RANKS + 1)
    validation = [tuple(batch) for batch in loader] if listed else loader
    training = DataLoader(TensorDataset(*samples(14)), batch_size=7)
    for batch, whole in zip(world.shard(training), training, strict=True):
        with torch.no_grad():
            seen = [(loss_of(model, batch), len(batch[0])) for batch in world.shard(validation)]
            assert world.sum([sum(n for _, n in seen)]) == [RANKS + 3]
            count = sum(n for _, n in seen)
            own = sum(loss * n for loss, n in seen) / count if count else math.nan
            expected = loss_of(model, data)
        assert world.mean(own, count) == pytest.approx(float(expected), rel=1e-14)
        loss_of(model, batch).backward()
        assert optimizer.step().weight == 7
        optimizer.zero_grad()
        alone.step(loss_of(alone.model, whole))
    assert_parity(world, model, alone)


def test_the_mean_over_ranks_is_weighted_and_skips_ranks_of_no_weight(world):
    assert world.mean(RANK) == (RANKS - 1) / 2
    weights = [rank % 3 for rank in range(RANKS)]
    if RANKS > 1:
        value = float(RANK) if weights[RANK] else math.nan
        expected = sum(r * w for r, w in enumerate(weights)) / sum(weights)
        assert world.mean(value, weights[RANK]) == pytest.approx(expected, rel=1e-15)
    values = torch.tensor([[RANK, 1.0, 3e-9]], requires_grad=True)
    mean = world.mean(values)
    assert (mean.shape, mean.dtype, mean.requires_grad) == ((1, 3), torch.float64, False)
    assert mean[0, :2].tolist() == [(RANKS - 1) / 2, 1.0]
    assert values[0, 0] == RANK
    assert math.isnan(world.mean(math.nan, 1.0))


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "9"])
def test_a_bad_weight_of_one_rank_is_refused_on_all(world, weight):
    said = refusal(world.mean, 1.0, weight if RANK == RANKS - 1 else 1.0)
    of_rank = f"rank {RANKS - 1}: " if RANKS > 1 else ""
    assert said.startswith(f"world.mean: {of_rank}weight is {weight!r}: give a finite number")


def test_a_mean_without_weight_is_refused(world):
    assert refusal(world.mean, 1.0, 0) == "world.mean: the weights of all ranks are 0"


def test_a_mean_of_what_is_no_number_is_refused_on_all_ranks(world):
    said = refusal(world.mean, "a" if RANK == 0 else 1.0)
    of_rank = "rank 0: " if RANKS > 1 else ""
    assert said == f"world.mean: {of_rank}the value is 'a': give a number or a tensor"
    assert "the value is [1, 2]" in refusal(world.mean, [1, 2])


class OwnStreams(IterableDataset):
    """Each reader has samples of its own: the last one none, the others unlike numbers."""

    def __iter__(self):
        info = get_worker_info()
        n = 0 if info.id == info.num_workers - 1 > 0 else 3 + 4 * info.id
        yield from zip(*samples(n, seed=info.id), strict=True)


@STAGES
def test_streams_of_unequal_length_train_on_every_sample(world, make, stage):
    model = net()
    alone = Alone(model, SGD)
    optimizer = make(model, SGD, stage=stage)
    loader = DataLoader(OwnStreams(), batch_size=2 * RANKS)
    parts, seen = world.shard(loader), 0
    for _ in range(2):
        own = iter(sharded(loader, RANK, RANKS, gather=lambda value: [value] * RANKS))
        for batch in parts:
            mine = next(own, None)
            stand_in = [column[:0] for column in batch]
            whole = together(world, mine if mine else stand_in)
            seen += len(whole[0])
            loss_of(model, batch).backward()
            assert optimizer.step().weight == len(whole[0])
            optimizer.zero_grad()
            alone.step(loss_of(alone.model, whole))
    assert seen == 2 * sum(3 + 4 * i for i in range(max(1, RANKS - 1)))
    assert_parity(world, model, alone)


class WholeStream(IterableDataset):
    def __iter__(self):
        yield from zip(*samples(17), strict=True)


def test_a_stream_that_all_ranks_read_trains_on_its_global_batches(world, make):
    model = net()
    alone = Alone(model, SGD)
    optimizer = make(model, SGD)
    loader = DataLoader(WholeStream(), batch_size=5)
    for batch, whole in zip(world.shard(loader), loader, strict=True):
        loss_of(model, batch).backward()
        assert optimizer.step().weight == len(whole[0])
        optimizer.zero_grad()
        alone.step(loss_of(alone.model, whole))
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


@pytest.mark.mpi(min_size=2)
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
def test_an_optimizer_that_leaves_out_batches_uses_the_latest(world, make, stage):
    """A critic that is trained on every batch, and a generator on every third one and the last."""
    models = net(), net()
    alone = [Alone(model, SGD) for model in models]
    optimizers = [make(model, SGD, stage=stage) for model in models]
    loader = DataLoader(TensorDataset(*samples(24)), batch_size=7)
    for _ in range(2):
        for index, (batch, whole) in enumerate(zip(world.shard(loader), loader, strict=True)):
            for which in (0, 1) if index in (1, 3) else (0,):
                loss_of(models[which], batch).backward()
                assert optimizers[which].step().weight == len(whole[0])
                optimizers[which].zero_grad()
                alone[which].step(loss_of(alone[which].model, whole))
    for model, oracle in zip(models, alone, strict=True):
        assert_parity(world, model, oracle)


@STAGES
def test_two_models_have_loaders_of_unlike_batches(world, make, stage):
    models = net(), net()
    alone = [Alone(model, SGD) for model in models]
    optimizers = [make(model, SGD, stage=stage) for model in models]
    loaders = [DataLoader(TensorDataset(*samples(n)), batch_size=n // 3) for n in (23, 11)]
    for _ in zip(*[zip(world.shard(each), each, strict=True) for each in loaders], strict=True):
        break  # draws a batch of both at once: they are dropped with the passes
    parts = [iter(world.shard(each)) for each in loaders]
    for wholes in zip(*loaders, strict=True):
        for which in (0, 1):
            loss_of(models[which], next(parts[which])).backward()
            assert optimizers[which].step().weight == len(wholes[which][0])
            optimizers[which].zero_grad()
            alone[which].step(loss_of(alone[which].model, wholes[which]))
    for model, oracle in zip(models, alone, strict=True):
        assert_parity(world, model, oracle)


@STAGES
def test_two_shards_at_once_with_a_smaller_last_batch(world, make, stage):
    model = net()
    alone = Alone(model, SGD)
    loaders = [DataLoader(TensorDataset(*samples(17, seed=s)), batch_size=7) for s in (1, 2)]
    optimizer = make(model, SGD, stage=stage)
    for _ in range(2):
        for both in zip(*map(world.shard, loaders), strict=True):
            sum(loss_of(model, batch) for batch in both).backward()
            optimizer.step()
            optimizer.zero_grad()
        for both in zip(*loaders, strict=True):
            alone.step(sum(loss_of(alone.model, batch) for batch in both))
    assert_parity(world, model, alone)


def test_batches_of_unlike_weights_are_not_mixed_up(world, make):
    model = net()
    make(model, SGD)
    parts = iter(world.shard([samples(2 * RANKS)] * 2, weight=lambda batch: next(weights)))
    weights = iter([3, 5])
    next(parts)  # left out by the loop
    loss = loss_of(model, next(parts))
    with pytest.raises(RuntimeError, match="draw one batch at a time"):
        loss.backward()
