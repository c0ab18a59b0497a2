"""The transport of a job: as requested, or by the rule of `auto`."""

import pytest
import torch

import mntrain
from gpu.place import CUDA, ON, gpu
from gpu.ranks.transports import TRANSPORTS, transports

pytestmark = [pytest.mark.mpi, *gpu]


@transports
def test_a_world_has_the_requested_transport(worlds, transport):
    world = worlds(transport)
    assert world.device.type == ON
    chosen = transport if CUDA and world.size > 1 else ""
    assert world.gather(world.transport) == [chosen] * world.size


@pytest.mark.skipif(not CUDA, reason="the CPU has no transports to select")
def test_auto_selects_a_working_transport_the_same_on_all_ranks():
    with mntrain.init(device=ON) as world:
        assert world.transport in (TRANSPORTS if world.size > 1 else [""])
        assert len(set(world.gather(world.transport))) == 1
        tensor = torch.full((1_000_003,), float(world.rank), device=world.device)
        world.collectives.all_reduce(tensor).wait()
        assert (tensor == sum(range(world.size))).all()
