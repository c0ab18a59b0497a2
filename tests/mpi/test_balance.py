"""Loops of one's own whose ranks differ in speed: `world.shard(loader, balance=True)`."""

import contextlib
import time
from functools import partial
from weakref import WeakKeyDictionary

import pytest
import torch
from devices import LateDevice
from lone_nodes import PER_NODE
from mpi4py import MPI
from oracle import assert_close, update
from rig import TRANSPORTS
from sharding import sharded
from torch import nn
from torch.utils.data import ChainDataset, DataLoader, TensorDataset

from mntrain.data.loader import Passes
from mntrain.sync import DiLoCo, LocalSGD

pytestmark = pytest.mark.simulated

BATCH, EPOCHS = 12, 2
PASSES = WeakKeyDictionary()  # of one process, over loaders
SGD = partial(torch.optim.SGD, lr=0.05)


@pytest.fixture(autouse=True)
def unknown_speeds(world):
    """A new dataset would go on with the speeds that another test has measured."""
    world._shards._balances.clear()


def make_loader():
    generator = torch.Generator().manual_seed(5)
    samples = torch.randn(180, 7, generator=generator)
    return DataLoader(TensorDataset(samples, samples.sum(1, keepdim=True)), BATCH, shuffle=True)


def make_model():
    torch.manual_seed(1)
    return nn.Linear(7, 1)


def train(batches, model, optimizer, cost=0.0, meet=None):
    """Take a step for each batch, each sample of which takes some seconds; return their sizes."""
    sizes = []
    for x, y in batches:
        time.sleep(cost * len(x))
        if meet is not None:
            meet()
        update(optimizer, nn.functional.mse_loss(model(x), y))
        sizes.append(len(x))
    return sizes


def cost_of(world):
    """The seconds that a sample takes: four times as many on the last rank."""
    return 0.01 if world.rank == world.size - 1 else 0.0025


def expect_few_on_the_last_rank(world, size):
    """In proportion to 1, ..., 1, 0.25, in whole samples: sleep is virtual, so nothing disturbs."""
    speeds = [1.0] * (world.size - 1) + [0.25]
    expected = [BATCH * speed / sum(speeds) for speed in speeds]
    assert world.gather(size) == pytest.approx(expected, abs=1.0)


def trained_alone():
    """A model that was trained on the whole batches of all epochs, and these batches."""
    model, loader = make_model(), make_loader()
    batches = [batch for _ in range(EPOCHS) for batch in ordered(loader)]
    train(batches, model, SGD(model.parameters()))
    return model, batches


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_a_slow_rank_gets_fewer_samples_and_the_weights_stay(world, make, stage, capfd):
    alone, whole = trained_alone()
    model = make_model()
    optimizer = make(model, SGD, stage=stage)
    batches = world.shard(make_loader(), balance=True)
    sizes = [
        size for _ in range(EPOCHS) for size in train(batches, model, optimizer, cost_of(world))
    ]
    by_rank = world.gather(sizes)
    assert [sum(row) for row in zip(*by_rank, strict=True)] == [BATCH] * len(whole)
    assert by_rank[-1][0] == BATCH // world.size
    expect_few_on_the_last_rank(world, sizes[-1])
    assert_close(model, alone, 1e-4, 1e-5)
    named = f"rank {world.size - 1} on {world.places[-1].host} takes "
    assert (named in capfd.readouterr().err) == world.master


@pytest.mark.parametrize("weighted", [True, False])
def test_an_accumulation_over_two_plans_is_exact(world, make, weighted):
    alone, reference = make_model(), make_loader()
    whole = ordered(reference)
    plain = SGD(alone.parameters())
    model = make_model()
    optimizer = make(model, SGD)
    batches = world.shard(make_loader(), balance=True)
    for number, (x, y) in enumerate(batches):
        time.sleep(cost_of(world) * len(x))
        last = number % 4 == 3
        with contextlib.nullcontext() if last else optimizer.no_sync():
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.backward(loss, weight=len(x)) if weighted else (loss / 4).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    for four in zip(*[iter(whole)] * 4, strict=False):
        x, y = (torch.cat(column) for column in zip(*four, strict=True))
        train([(x, y)], alone, plain)
    assert_close(model, alone, 1e-4, 1e-5)
    optimizer.zero_grad()
    optimizer.forget_batches()


@pytest.mark.parametrize("data", ["one", "new", "short"])
def test_speeds_are_kept_for_a_shard_of_each_epoch(world, make, data):
    """Also if an epoch has a dataset of its own, or too few batches to measure speeds in it."""
    model, same = make_model(), make_loader()
    optimizer = make(model, SGD)
    epochs = []
    for _ in range(5 if data == "short" else 2):
        short = [tuple(batch) for batch in same][:3]
        loader = {"one": same, "new": make_loader(), "short": short}[data]
        parts = world.shard(loader, balance=True)
        epochs.append(train(parts, model, optimizer, cost_of(world)))
    expect_few_on_the_last_rank(world, epochs[-1][0])


@pytest.mark.parametrize("meeting", ["barrier", "sum", "agreement"])
def test_waits_for_a_slow_rank_are_not_a_ranks_own_time(world, make, meeting):
    """Otherwise all ranks would seem to be as slow as the slowest one."""
    model = make_model()
    optimizer = make(model, SGD)

    def agree():
        with world.agreement():
            pass

    meet = {"barrier": world.barrier, "sum": lambda: world.sum([1.0]), "agreement": agree}[meeting]
    batches = world.shard(make_loader(), balance=True)
    sizes = train(batches, model, optimizer, cost_of(world), meet)
    expect_few_on_the_last_rank(world, sizes[-1])


def ordered(loader, number=0):
    """The whole batches of a loader's next epoch; its dataset is a world's first or a later."""
    passes = PASSES.setdefault(loader, Passes(numbers={0: number}))
    return [list(batch) for batch in sharded(loader, passes=passes)]


def test_what_cannot_be_balanced_is_refused(world):
    stream = DataLoader(ChainDataset([]), 4)
    with pytest.raises(ValueError, match="samples of an IterableDataset"):
        world.shard(stream, balance=True)


@pytest.mark.parametrize("second", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_two_loaders_at_a_time_need_stated_weights(world, make, second):
    """Otherwise ranks whose parts happen to be equal would go on, and others fail."""
    reference, other = make_loader(), make_loader()
    alone = make_model()
    plain = SGD(alone.parameters())
    for (x, y), (z, _) in zip(ordered(reference), ordered(other, 1), strict=True):
        update(plain, nn.functional.mse_loss(alone(x), y) + alone(z).square().mean())
    model = make_model()
    first = make(model, SGD)
    loaders = world.shard(make_loader(), balance=True), world.shard(make_loader(), balance=second)
    for number, ((x, y), (z, _)) in enumerate(zip(*loaders, strict=True)):
        time.sleep(cost_of(world) * len(x))
        losses = nn.functional.mse_loss(model(x), y), model(z).square().mean()
        if number == 0:
            with pytest.raises(RuntimeError, match=r"of 2 loaders .* state the weight by"):
                sum(losses).backward()
            first.zero_grad()
            losses = nn.functional.mse_loss(model(x), y), model(z).square().mean()
        counts = world.sum([len(x), len(z)])
        own = [world.size * len(c) / n for c, n in zip((x, z), counts, strict=True)]
        first.share(1)
        update(first, sum(loss * factor for loss, factor in zip(losses, own, strict=True)))
    assert_close(model, alone, 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("sync", "has"),
    [(DiLoCo(5), "sync="), (LocalSGD(5, max_staleness=1, weighted=True), "max_staleness")],
)
def test_nodes_that_train_alone_are_refused(worlds, make, sync, has):
    world, model = worlds(layout=PER_NODE), make_model()
    optimizer = make(model, SGD, world=world, sync=sync, overlap_forward=False)
    with pytest.raises(ValueError, match=f"balance=True with an optimizer that has {has}"):
        train(world.shard(make_loader(), balance=True), model, optimizer)
    optimizer.close()
    train(world.shard(make_loader(), balance=True), model, make(model, SGD, world=world))


def test_nodes_that_exchange_rarely_and_weigh_their_samples_are_balanced(worlds, make):
    world = worlds(layout=PER_NODE)
    world._shards._balances.clear()
    world._shards.begin_anew()
    alone, _ = trained_alone()
    model, sync, sizes = make_model(), LocalSGD(1, weighted=True), []
    optimizer = make(model, SGD, world=world, sync=sync, overlap_forward=False)
    batches = world.shard(make_loader(), balance=True)
    for _ in range(EPOCHS):
        sizes += train(batches, model, optimizer, cost_of(world))
    by_rank = [own[-1] for own in world.gather(sizes)]
    assert by_rank[-1] < min(by_rank[:-1])
    assert_close(model, alone, 1e-4, 1e-5)


DEVICE_BATCH, DEVICE_BATCHES = 16, 30


def run_on_device(one, batches, cost_s):
    """Queue computing and an all-reduce for each batch; return the samples of each."""
    gradient, sizes = one.device.tensor(3000), []
    for (samples,) in batches:
        count = len(samples)
        one.device.run(lambda count=count: time.sleep(cost_s * count))
        one.device.run(lambda: gradient.fill_(1.0))
        one.collectives.all_reduce(gradient).wait()
        sizes.append(count)
    one.device.synchronize()
    assert torch.equal(gradient, torch.full_like(gradient, one.world.size))
    return sizes


@pytest.mark.processes  # the threads of emulated devices sleep
@pytest.mark.parametrize(
    "name",
    [TRANSPORTS[0], *(pytest.param(n, marks=pytest.mark.exhaustive) for n in TRANSPORTS[1:])],
)
@pytest.mark.parametrize("slow", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_parts_follow_the_time_of_devices_without_waits(rig, name, slow):
    one = rig(2, LateDevice(MPI.COMM_WORLD.rank))
    one.use(name)
    world = one.world
    world.waits.copier = one.device
    loader = DataLoader(TensorDataset(torch.arange(DEVICE_BATCH * DEVICE_BATCHES)), DEVICE_BATCH)
    last = world.rank == world.size - 1
    sizes = run_on_device(one, world.shard(loader, balance=True), 8e-3 if slow and last else 2e-3)
    by_rank = world.gather(sizes)
    assert [sum(row) for row in zip(*by_rank, strict=True)] == [DEVICE_BATCH] * DEVICE_BATCHES
    if slow:
        # In proportion to 1, ..., 1, 0.25, to within three samples: the cores are shared.
        speeds = [1.0] * (world.size - 1) + [0.25]
        expected = [DEVICE_BATCH * speed / sum(speeds) for speed in speeds]
        assert [own[-1] for own in by_rank] == pytest.approx(expected, abs=3.0)
    else:
        assert all(max(own) - min(own) <= 1 for own in by_rank)
