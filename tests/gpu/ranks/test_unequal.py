"""Own loops whose ranks differ in the work of a sample: `world.shard(loader, balance=True)`.

Ranks that share a GPU take turns on it, so a rank's part says who is slow, and not how much.
"""

import pytest
import torch
from cases import RANK
from oracle import update
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import RANKS

from gpu.place import compute, gpu
from gpu.ranks.transports import transports

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(RANKS == 1, reason="one rank divides nothing"),
    *gpu,
]

BATCH, BATCHES = 48, 30


def make_loader():
    generator = torch.Generator().manual_seed(5)
    samples = torch.randn(BATCH * BATCHES, 7, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(samples, samples.sum(1, keepdim=True)), BATCH)


def make_model(device):
    torch.manual_seed(1)
    return nn.Linear(7, 1, dtype=torch.float64).to(device)


def train(batches, model, optimizer, device, sample_s=0.0):
    """Take a step for each batch, without a wait for the device; return their sizes."""
    sizes = []
    for x, y in batches:
        compute(sample_s * len(x))
        update(optimizer, nn.functional.mse_loss(model(x.to(device)), y.to(device)))
        sizes.append(len(x))
    return sizes


@pytest.mark.parametrize("stage", [0, 2])
@transports
def test_a_rank_with_more_work_gets_fewer_samples_and_the_weights_stay(worlds, transport, stage):
    world = worlds(transport)
    alone = make_model("cpu")
    train(make_loader(), alone, torch.optim.SGD(alone.parameters(), lr=0.05), "cpu")
    model = make_model(world.device)
    optimizer = world.optimizer(model, torch.optim.SGD, lr=0.05, stage=stage)
    batches = world.shard(make_loader(), balance=True)
    sizes = train(batches, model, optimizer, world.device, 2e-3 if RANK == RANKS - 1 else 2.5e-4)
    optimizer.wait_for_parameters()
    by_rank = world.gather(sizes)
    assert [sum(row) for row in zip(*by_rank, strict=True)] == [BATCH] * BATCHES
    # Equal at first, or by the speeds of an earlier pass of this world.
    assert by_rank[-1][0] <= BATCH // RANKS
    *others, slow = [sum(own[-10:]) for own in by_rank]
    assert slow < min(others)
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.cpu(), expected, rtol=1e-9, atol=1e-9)
    optimizer.close()
