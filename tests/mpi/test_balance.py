"""Loops of one's own whose ranks differ in speed: `world.shard(loader, balance=True)`."""

import contextlib
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mntrain

pytestmark = pytest.mark.mpi

BATCH, EPOCHS = 12, 2


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
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(x))
    return sizes


def expect_close(model, other, rtol=1e-4, atol=1e-5):
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=rtol, atol=atol)


@pytest.fixture
def cost(world):
    """The seconds that a sample takes on this rank: many on the last one."""
    return 0.01 if world.rank == world.size - 1 else 0.0


def expect_fewer(world, samples):
    """The last rank has fewer samples than any other."""
    by_rank = world.gather(samples)
    assert world.size == 1 or by_rank[-1] < min(by_rank[:-1])


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.thorough), 2])
def test_a_slow_rank_gets_fewer_samples_and_the_weights_stay(world, make, cost, stage):
    alone, reference = make_model(), make_loader()
    whole = [batch for _ in range(EPOCHS) for batch in ordered(world, reference)]
    train(whole, alone, torch.optim.SGD(alone.parameters(), lr=0.05))
    model = make_model()
    optimizer = make(model, torch.optim.SGD, lr=0.05, stage=stage)
    batches = world.shard(make_loader(), balance=True)
    sizes = [n for _ in range(EPOCHS) for n in train(batches, model, optimizer, cost)]
    by_rank = world.gather(sizes)
    assert [sum(row) for row in zip(*by_rank, strict=True)] == [BATCH] * len(whole)
    if world.size > 1:
        assert by_rank[-1][0] == BATCH // world.size
    expect_fewer(world, sizes[-1])
    expect_close(model, alone)


@pytest.mark.parametrize("weighted", [True, False])
def test_an_accumulation_over_two_plans_is_exact(world, make, cost, weighted):
    alone, reference = make_model(), make_loader()
    whole = ordered(world, reference)
    plain = torch.optim.SGD(alone.parameters(), lr=0.05)
    model = make_model()
    optimizer = make(model, torch.optim.SGD, lr=0.05)
    batches = world.shard(make_loader(), balance=True)
    for number, (x, y) in enumerate(batches):
        time.sleep(cost * len(x))
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
    expect_close(model, alone)
    optimizer.zero_grad()
    optimizer.forget_batches()


@pytest.mark.parametrize("data", ["one", "new", "short"])
def test_speeds_are_kept_for_a_shard_of_each_epoch(world, make, cost, data):
    """Also if an epoch has a dataset of its own, or too few batches to measure speeds in it."""
    model, same = make_model(), make_loader()
    optimizer = make(model, torch.optim.SGD, lr=0.05)
    epochs = []
    for _ in range(5 if data == "short" else 2):
        short = [tuple(batch) for batch in same][:3]
        loader = {"one": same, "new": make_loader(), "short": short}[data]
        parts = world.shard(loader, balance=True)
        epochs.append(train(parts, model, optimizer, cost))
    expect_fewer(world, epochs[-1][0])


@pytest.mark.parametrize("meeting", ["barrier", "sum", "agreement"])
def test_waits_for_a_slow_rank_are_not_a_ranks_own_time(world, make, cost, meeting):
    """Otherwise all ranks would seem to be as slow as the slowest one."""
    model = make_model()
    optimizer = make(model, torch.optim.SGD, lr=0.05)

    def agree():
        with world.agreement():
            pass

    meet = {"agreement": agree, "barrier": world.barrier, "sum": lambda: world.sum([1.0])}[meeting]
    batches = world.shard(make_loader(), balance=True)
    expect_fewer(world, train(batches, model, optimizer, cost, meet)[-1])


def ordered(world, loader):
    """The whole batches of the next epoch of a loader."""
    return [
        [torch.cat(column) for column in zip(*parts, strict=True)]
        for parts in zip(*world.gather(list(world.shard(loader))), strict=True)
    ]


def test_what_cannot_be_balanced_is_refused(world):
    stream = DataLoader(Stream(), 4)
    with pytest.raises(ValueError, match="samples of an IterableDataset"):
        world.shard(stream, balance=True)


class Stream(torch.utils.data.IterableDataset):
    """Numbers."""

    def __iter__(self):
        return iter(range(10))


class Adversaries:
    """A generator and a discriminator, whose optimizers learn of the same batches."""

    def __init__(self, optimizer_of):
        torch.manual_seed(3)
        self.generator, self.judge = nn.Linear(7, 1).double(), nn.Linear(1, 1).double()
        self._of_generator = optimizer_of(self.generator)
        self._of_judge = optimizer_of(self.judge)

    def train(self, batches, cost=0.0):
        """Take a step of the discriminator for each batch, and one of the generator every second.

        Noise is a column of the data, so that it does not depend on the rank. Return sizes.
        """
        sizes = []
        for number, batch in enumerate(batches):
            noise, real = (column.double() for column in batch)
            time.sleep(cost * len(noise))
            fake = self.generator(noise)
            for samples, sign in ((real, -1.0), (fake.detach(), 1.0)):
                with contextlib.nullcontext() if sign > 0 else self._accumulation():
                    nn.functional.softplus(sign * self.judge(samples)).mean().backward()
            self._step(self._of_judge)
            if number % 2:
                nn.functional.softplus(-self.judge(fake)).mean().backward()
                self._step(self._of_generator)
            sizes.append(len(noise))
        return sizes

    def _accumulation(self):
        return getattr(self._of_judge, "no_sync", contextlib.nullcontext)()

    def _step(self, optimizer):
        optimizer.step()
        for each in (self._of_generator, self._of_judge):
            each.zero_grad()


@pytest.mark.parametrize("stage", [0, 1])
def test_several_optimizers_weigh_the_same_parts(world, make, cost, stage):
    reference = make_loader()
    alone = Adversaries(lambda model: torch.optim.SGD(model.parameters(), lr=0.2))
    for _ in range(EPOCHS):
        alone.train(ordered(world, reference))
    ours = Adversaries(lambda model: make(model, torch.optim.SGD, lr=0.2, stage=stage))
    batches = world.shard(make_loader(), balance=True)
    sizes = [n for _ in range(EPOCHS) for n in ours.train(batches, cost)]
    expect_fewer(world, sizes[-1])
    for model, other in ((ours.judge, alone.judge), (ours.generator, alone.generator)):
        expect_close(model, other, 1e-9, 1e-9)


@pytest.mark.parametrize("second", [True, False])
def test_two_loaders_at_a_time_need_stated_weights(world, make, cost, second):
    """Otherwise ranks whose parts happen to be equal would go on, and others fail."""
    reference, other = make_loader(), make_loader()
    alone = make_model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.05)
    for (x, y), (z, _) in zip(ordered(world, reference), ordered(world, other), strict=True):
        (nn.functional.mse_loss(alone(x), y) + alone(z).square().mean()).backward()
        plain.step()
        plain.zero_grad()
    model = make_model()
    first = make(model, torch.optim.SGD, lr=0.05)
    loaders = world.shard(make_loader(), balance=True), world.shard(make_loader(), balance=second)
    for number, ((x, y), (z, _)) in enumerate(zip(*loaders, strict=True)):
        time.sleep(cost * len(x))
        losses = nn.functional.mse_loss(model(x), y), model(z).square().mean()
        if number == 0 and world.size > 1:
            with pytest.raises(RuntimeError, match=r"of 2 loaders .* state the weight by"):
                sum(losses).backward()
            first.zero_grad()
            losses = nn.functional.mse_loss(model(x), y), model(z).square().mean()
        counts = world.sum([len(x), len(z)])
        own = [world.size * len(c) / n for c, n in zip((x, z), counts, strict=True)]
        first.share(1)
        sum(loss * factor for loss, factor in zip(losses, own, strict=True)).backward()
        first.step()
        first.zero_grad()
    expect_close(model, alone)


def test_nodes_that_train_alone_are_refused(world, make):
    if len(world.topology.nodes) == 1 or len({len(node) for node in world.topology.nodes}) > 1:
        pytest.skip("needs nodes of equal numbers of ranks")
    model = make_model()
    optimizer = make(model, torch.optim.SGD, lr=0.05, sync=mntrain.sync.DiLoCo(every=5))
    with pytest.raises(ValueError, match="balance=True with an optimizer that has sync="):
        train(world.shard(make_loader(), balance=True), model, optimizer)
    optimizer.close()
    train(world.shard(make_loader(), balance=True), model, make(model, torch.optim.SGD, lr=0.05))
