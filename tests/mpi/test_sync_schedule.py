"""A schedule that averages parameters every second step; each rank trains alone in between."""

import math

import pytest
import torch
from mpi4py import MPI
from oracle import init
from torch import nn
from worlds import RANKS, refusal

from zero import SingleProcessCollectives
from zero.exchange.schedule import SyncSchedule
from zero.norms import NonFiniteGradientError

pytestmark = pytest.mark.mpi

RANK = MPI.COMM_WORLD.rank
SGD = {"optimizer_class": torch.optim.SGD, "lr": 0.5}


class AverageEverySecondStep(SyncSchedule):
    """Every rank is a group of its own; after steps 1, 3, ... ranks average their parameters."""

    def __init__(self, world):
        self.sharding, self._world = SingleProcessCollectives(), world
        self.replica, self.replicas, self.asked = world.rank, world.size, set()

    def group(self, step):
        self.asked.add(step)
        return self.sharding

    def exchange_due(self, step):
        return step % 2 == 1

    def average(self, tensors):
        for tensor in tensors:
            self._world.all_reduce(tensor.detach().view(-1)).wait()
            tensor.div_(self._world.size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_differ_between_averages_and_agree_after_them(stage, dtype):
    model, other = (nn.Linear(4, 1, bias=False, dtype=dtype) for _ in range(2))
    with init() as world:
        schedule = AverageEverySecondStep(world.collectives)
        optimizer = world.optimizer(model, **SGD, stage=stage, sync=schedule)
        initial = model.weight.tolist()
        assert world.gather(initial) == [initial] * RANKS
        for _ in range(2):
            before = model.weight.detach().clone()
            inputs = torch.full((1, 4), 1.0 + RANK, dtype=dtype)
            for turn in range(2):
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                everyone = world.gather(model.weight.tolist())
                assert len({str(weights) for weights in everyone}) == (1 if turn else RANKS)
            # Two steps of 0.5 * (1 + rank), averaged over ranks.
            expected = before - (1 + (RANKS - 1) / 2)
            torch.testing.assert_close(model.weight.detach(), expected)
        assert schedule.asked == {0, 1, 2, 3, 4}
        resumed = AverageEverySecondStep(world.collectives)
        after = world.optimizer(other, **SGD, stage=stage, sync=resumed)
        after.load_state_dict(optimizer.state_dict())  # which has the number of steps
        resumed.asked.clear()
        assert after.group is resumed.sharding
        assert resumed.asked == {4}


@pytest.mark.parametrize(
    ("non_finite", "loss_scale"), [("skip", None), ("skip", "dynamic"), ("stop", None)]
)
def test_a_step_that_is_not_finite_on_one_rank_is_none_on_all(non_finite, loss_scale):
    model = nn.Linear(4, 1, bias=False)
    with init() as world:
        given = {"sync": AverageEverySecondStep(world.collectives), "non_finite": non_finite}
        optimizer = world.optimizer(model, **SGD, **given, loss_scale=loss_scale)
        factor = math.inf if RANK == RANKS - 1 else 1.0
        optimizer.scale(model(torch.ones(1, 4)).sum() * factor).backward()
        if non_finite == "skip":
            assert optimizer.step().skipped
            told = optimizer.state_dict()["loss_scale"]
        else:
            with pytest.raises(NonFiniteGradientError) as error:
                optimizer.step()
            told = str(error.value)
            assert "not finite in weight" in told
        assert world.gather(told) == [told] * RANKS


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("replica", "replicas"), [(0, 1), (RANKS, RANKS)])
def test_replicas_that_are_not_all_ranks_are_refused(replica, replicas):
    with init() as world:
        schedule = AverageEverySecondStep(world.collectives)
        schedule.replica, schedule.replicas = replica, replicas
        said = refusal(world.optimizer, nn.Linear(4, 1), **SGD, sync=schedule)
    assert said.startswith(f"the sync schedule shards over 1 ranks, and this is replica {replica}")
