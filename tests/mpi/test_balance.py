"""Loops of one's own whose ranks differ in speed: `world.shard(loader, balance=True)`."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.mpi

BATCH, EPOCHS = 12, 2


def make_loader():
    generator = torch.Generator().manual_seed(5)
    samples = torch.randn(180, 7, generator=generator)
    return DataLoader(TensorDataset(samples, samples.sum(1, keepdim=True)), BATCH, shuffle=True)


def make_model():
    torch.manual_seed(1)
    return nn.Linear(7, 1)


def train(batches, model, optimizer, cost=0.0):
    """Take a step for each batch, each sample of which takes some seconds; return their sizes."""
    sizes = []
    for x, y in batches:
        time.sleep(cost * len(x))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(x))
    return sizes


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.thorough), 2])
def test_a_slow_rank_gets_fewer_samples_and_the_weights_stay(world, make, stage):
    alone, reference = make_model(), make_loader()
    whole = [batch for _ in range(EPOCHS) for batch in ordered(world, reference)]
    train(whole, alone, torch.optim.SGD(alone.parameters(), lr=0.05))
    model = make_model()
    optimizer = make(model, torch.optim.SGD, lr=0.05, stage=stage)
    slow = world.rank == world.size - 1
    batches = world.shard(make_loader(), balance=True)
    sizes = [
        size
        for _ in range(EPOCHS)
        for size in train(batches, model, optimizer, cost=0.01 if slow else 0.0)
    ]
    by_rank = world.gather(sizes)
    assert [sum(row) for row in zip(*by_rank, strict=True)] == [BATCH] * len(whole)
    if world.size > 1:
        assert by_rank[-1][0] == BATCH // world.size
        assert by_rank[-1][-1] < min(sizes[-1] for sizes in by_rank[:-1])
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)


def ordered(world, loader):
    """The whole batches of the next epoch of a loader."""
    return [
        [torch.cat(column) for column in zip(*parts, strict=True)]
        for parts in zip(*world.gather(list(world.shard(loader))), strict=True)
    ]


def test_what_cannot_be_balanced_is_refused(world):
    stream = DataLoader(Stream(), 4)
    with pytest.raises(ValueError, match="IterableDataset are divided equally"):
        world.shard(stream, balance=True)


class Stream(torch.utils.data.IterableDataset):
    """Numbers."""

    def __iter__(self):
        return iter(range(10))
