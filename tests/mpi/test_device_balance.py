"""Own loops on emulated devices that differ in speed: `world.shard(loader, balance=True)`."""

import time

import pytest
import torch
from devices import LateDevice
from mpi4py import MPI
from rig import TRANSPORTS
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="one rank has no plans"),
]

BATCH, BATCHES = 16, 30


def run(one, batches, cost_s):
    """Queue computing and an all-reduce for each batch; return the samples of each.

    The host runs ahead of its device as far as the transport lets it.
    """
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


@pytest.mark.parametrize(
    "name", [TRANSPORTS[0], *(pytest.param(n, marks=pytest.mark.thorough) for n in TRANSPORTS[1:])]
)
@pytest.mark.parametrize("slow", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_parts_follow_the_time_of_devices_without_waits(rig, name, slow):
    one = rig(2, LateDevice(MPI.COMM_WORLD.rank))
    one.use(name)
    world = one.world
    world.waits.copier = one.device
    loader = DataLoader(TensorDataset(torch.arange(BATCH * BATCHES)), BATCH)
    last = world.rank == world.size - 1
    sizes = run(one, world.shard(loader, balance=True), 4e-3 if slow and last else 1e-3)
    by_rank = world.gather(sizes)
    assert [sum(row) for row in zip(*by_rank, strict=True)] == [BATCH] * BATCHES
    if slow:
        # In proportion to 1, ..., 1, 0.25, to within two samples: the cores are shared.
        speeds = [1.0] * (world.size - 1) + [0.25]
        expected = [BATCH * speed / sum(speeds) for speed in speeds]
        assert [own[-1] for own in by_rank] == pytest.approx(expected, abs=2.0)
    else:
        assert all(max(own) - min(own) <= 1 for own in by_rank)
