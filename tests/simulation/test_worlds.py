"""Whole worlds on simulated ranks: loops over `world.shard`, groups, and what ranks exchange."""

from functools import partial

import pytest
import torch
from model_digest import model_digest
from models import net
from network import NetworkModel
from oracle import EXACT, PlainTraining, assert_close, loss_of, samples, update
from simulated_worlds import SimulatedWorlds
from torch.utils.data import DataLoader, TensorDataset
from virtual_time import current

from mntrain.errors import AgreedError

ADAMW = partial(torch.optim.AdamW, lr=0.01)
LATE = NetworkModel(late_s=50e-6, eager_bytes=256)


def batches():
    """Batches that no number of ranks divides, the last one shorter."""
    return DataLoader(TensorDataset(*samples(31)), batch_size=11)


@pytest.mark.parametrize("nodes", [[2, 1], [1, 3, 1]], ids=["2+1", "1+3+1"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_loop_over_parts_of_batches_trains_as_one_process_does(stage, nodes):
    def program(world):
        model = net()
        optimizer = world.optimizer(
            model, torch.optim.AdamW, stage=stage, lr=0.01, overlap_forward=True
        )
        for _ in range(2):
            for batch in world.shard(batches()):
                current().time.sleep(1e-5 * (world.rank % 3))
                update(optimizer, loss_of(model, batch))
        optimizer.close()
        return model

    alone = PlainTraining(net(), ADAMW)
    for _ in range(2):
        for batch in batches():
            alone.step(loss_of(alone.model, batch))
    worlds = SimulatedWorlds(nodes, seed=stage, network=LATE, options={"bucket_mb": 1e-3})
    found = worlds.run(program)
    for model in found:
        assert_close(model, alone.model, EXACT)
    assert len(set(map(model_digest, found))) == 1


def test_groups_of_ranks_and_objects_are_those_of_the_topology():
    def program(world):
        node, cross = map(world.group_collectives, ("node", "cross"))
        sums = []
        for collectives in (node, cross):
            tensor = torch.full((5000,), 10.0**world.rank, dtype=torch.float64)
            collectives.all_reduce(tensor).wait()
            sums.append(tensor[-1].item())
        told = world.broadcast({"from": world.rank})
        return sums, world.gather(world.rank**2), told, world.sum([1.0, world.rank])

    found = SimulatedWorlds(hosts=[0, 1, 0, 1, 1], seed=2, network=LATE).run(program)
    assert [sums for sums, *_ in found] == [
        [101.0, 11.0],
        [11010.0, 11.0],
        [101.0, 1100.0],
        [11010.0, 1100.0],
        [11010.0, 10000.0],
    ]
    for _, squares, told, total in found:
        assert (squares, told, total) == ([0, 1, 4, 9, 16], {"from": 0}, [5.0, 10.0])


def test_ranks_whose_models_differ_refuse_them_together():
    def program(world):
        model = torch.nn.Linear(3 + (world.rank == 2), 2)
        world.optimizer(model, torch.optim.SGD, lr=0.1)

    found = SimulatedWorlds([2, 2], seed=1).run(program, errors=True)
    assert all(isinstance(error, AgreedError) for error in found)
    assert len({str(error) for error in found}) == 1
    assert "rank 2" in str(found[0])
