"""Training on N ranks gives the weights of one process that sees the whole of every batch.

Every rank trains the oracle too, with plain torch. In fp64 a wrong weight of a sample, or a
gradient summed twice, is far above the tolerance; the order of sums is far below it.
"""

import pytest
from models import MODELS, loss_at
from oracle import MAX_NORM, SMALL, loss_of, rows, samples
from sharding import sharded
from torch.utils.data import DataLoader, TensorDataset
from worlds import RANKS

pytestmark = [pytest.mark.simulated, pytest.mark.both]

every_world = pytest.mark.parametrize(
    ("algorithm", "layout"), [("naive", None), ("flat", None), ("leader", 2), ("lanes", 2)]
)


def shuffling():
    """Batches of 7, 7 and 2 samples: shares are unequal, and in the last some ranks have none."""
    return DataLoader(TensorDataset(*samples(16)), batch_size=7, shuffle=True)


def listed():
    return [rows(samples(16), low, high) for low, high in [(0, 7), (7, 8), (8, 14)]]


@pytest.mark.parametrize("loader", [shuffling, listed])
@every_world
def test_unequal_shares(worlds, pair, algorithm, layout, loader):
    world = worlds(algorithm, layout, SMALL)
    both = pair(world=world, max_grad_norm=MAX_NORM)
    ours, whole = world.shard(loader(), seed=3), sharded(loader(), seed=3)
    ours.load_state_dict(whole.state_dict())  # in the order of a world's first dataset
    for _ in range(2):
        for batch, global_batch in zip(ours, whole, strict=True):
            loss_of(both.alone.model, global_batch).backward()
            loss_of(both.model, batch).backward()
            result, norm = both.update()
            assert result.weight == len(global_batch[1])
            assert result.grad_norm == pytest.approx(norm, rel=1e-10)
    both.check()


@every_world
def test_parameters_that_some_ranks_leave_out_of_some_steps(worlds, pair, algorithm, layout):
    world = worlds(algorithm, layout, SMALL)
    both = pair(MODELS["fickle"](), world=world)
    for step in range(4):
        columns = [column.chunk(RANKS) for column in samples(12, seed=step)]
        parts = list(zip(*columns, strict=True))
        losses = [loss_at(both.alone.model, part, step, rank) for rank, part in enumerate(parts)]
        (sum(losses) / RANKS).backward()
        loss_at(both.model, parts[world.rank], step, world.rank).backward()
        if step > 1:  # a collective between, where ranks differ in what they have launched
            both.optimizer.synchronize()
            assert world.gather(world.rank) == list(range(RANKS))
        both.update()
    both.check()
