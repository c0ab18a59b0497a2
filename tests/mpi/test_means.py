"""Means, sums and maxima of metrics over micro-batches and ranks, against sums over all items."""

import math

import pytest
import torch
from mpi4py import MPI

import mntrain
from mntrain.errors import TrainingStoppedError
from mntrain.tasks import Max, Mean, Sum
from mntrain.train.step_means import StepMeans
from zero.step_message import StepMessage

pytestmark = pytest.mark.mpi

RANK, RANKS = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture(scope="module")
def group():
    with mntrain.init(device="cpu") as world:
        yield world.collectives


def items(rank, batch):
    """The losses of a rank's micro-batch; some have none."""
    count = (rank + 2 * batch) % 4
    return torch.arange(1, count + 1, dtype=torch.float64) * (rank + 1) + batch


def add(means, batch):
    own = items(RANK, batch)
    marked = own[own > 3]
    means.add(
        len(own),
        {
            "loss": own.mean(),
            "marked": Mean(marked.mean(), len(marked)),
            "total": Sum(own.sum()),
            "largest": Max(own.max() if len(own) else torch.tensor(-1.0)),
        },
    )


def test_a_message_has_sums_and_maxima_of_what_is_known_when_it_is_sent(group):
    message, nan = StepMessage(), math.nan
    known = []
    message.put("flag", 1.0)
    message.put("largest", lambda: known[0], "max")
    message.put("nan", nan if RANK == 0 else 5.0, "max")
    message.put("least", torch.tensor(-math.inf), "max")
    message.put("tensor", lambda: torch.tensor([2.0]))
    known.append(-1.0 - RANK)
    assert not message.sent
    message.send(group)
    found = message.read()
    assert math.isnan(found.pop("nan"))
    assert found == {"flag": RANKS, "largest": -1.0, "least": -math.inf, "tensor": 2.0 * RANKS}


def test_metrics_are_those_of_all_items(group):
    means = StepMeans(RANK)
    for step in range(3):
        batches = range(step, step + 3)
        for batch in batches:
            add(means, batch)
        reduced = means.reduce(group, "in a step")
        every = torch.cat([items(rank, batch) for rank in range(RANKS) for batch in batches])
        assert reduced.loss == pytest.approx(every.mean().item(), rel=1e-12)
        assert reduced.count == len(every)
        marked = every[every > 3]
        expected = {"largest": every.max().item(), "total": every.sum().item()}
        if len(marked):
            expected["marked"] = marked.mean().item()
        assert reduced.metrics == pytest.approx(expected, rel=1e-12)


def test_a_metric_may_begin_late_and_on_one_rank_only(group):
    means = StepMeans(RANK)
    found = []
    rare = {(1, RANKS - 1): {"rare": Mean(torch.tensor(5.0), 2)}, (3, 0): {"highest": Max(7.0)}}
    for step in range(4):
        means.add(1, {"loss": torch.tensor(2.0), **rare.get((step, RANK), {})})
        found.append(means.reduce(group, "in a step").metrics)
    assert found == [{}, {"rare": 5.0}, {}, {"highest": 7.0}]


def test_a_metric_that_ranks_reduce_in_two_ways_is_refused_on_all(group):
    means = StepMeans(RANK)
    metric = Sum(1.0) if RANK == RANKS - 1 else Max(1.0)
    means.add(1, {"loss": torch.tensor(2.0), "odd": metric})
    if RANKS == 1:
        means.reduce(group, "in step 1")
        means.add(1, {"loss": torch.tensor(2.0), "odd": Max(1.0)})
    with pytest.raises(TrainingStoppedError, match=r"the metric odd is a .*, and was a "):
        means.reduce(group, "in step 2")


def test_the_ranks_of_a_loss_that_is_not_finite_are_named(group):
    means = StepMeans(RANK)
    means.add(1, {"loss": torch.tensor(math.nan if RANK == RANKS - 1 else 1.0)})
    assert means.reduce(group, "in step 1").nonfinite == f"nan on rank {RANKS - 1}"


def test_a_group_without_items_has_no_loss_and_others_name_their_ranks_in_the_world():
    with mntrain.init(device="cpu", ranks_per_node=1) as world:
        means = StepMeans(RANK)
        if RANK == 0 or RANKS == 1:
            means.add(1, {"loss": torch.tensor(math.nan)})
        message = StepMessage()
        means.put(message, (RANK,))
        message.send(world.node_collectives)
        found = means.take(message, world.node_collectives, "in step 1", (RANK,))
        assert math.isnan(found.loss)
        assert found.nonfinite == ("nan on rank 0" if RANK == 0 else "")
        assert found.count == int(RANK == 0)
