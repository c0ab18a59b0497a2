"""Sharded optimizers on simulated ranks, against plain torch in one process."""

import copy
import math
from functools import partial

import pytest
import torch
from model_digest import model_digest
from models import net
from network import NetworkModel
from oracle import EXACT, PlainTraining, assert_close, loss_of, rows, samples
from simulated_ranks import SimulatedRanks
from torch import nn

from zero import ZeroOptimizer

STEPS = 4
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
NODES = [[1, 1], [2, 1], [2, 2], [1, 3, 2]]


def parts(size):
    """Where the ranks' parts of a batch begin and end: one more sample each than the one before."""
    return [rank * (rank + 1) // 2 for rank in range(size + 1)]


def batch(size, step):
    return samples(parts(size)[-1], seed=step)


@pytest.mark.parametrize("nodes", NODES, ids=lambda nodes: "+".join(map(str, nodes)))
@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_train_as_one_process_does_whatever_the_order_of_events(stage, partition, nodes):
    """Each rank takes another part of a batch, and computes for another time."""
    size, start = sum(nodes), net()

    def program(rank):
        model, (low, high) = copy.deepcopy(start), parts(size)[rank.rank : rank.rank + 2]
        optimizer = ZeroOptimizer(
            model,
            torch.optim.AdamW,
            rank.collectives.add_stream("the optimizer"),
            stage=stage,
            partition=partition,
            bucket_bytes=600,
            max_grad_norm=0.05,
            overlap_forward=True,
            lr=0.01,
            weight_decay=0.1,
        )
        norms = []
        for step in range(STEPS):
            rank.compute(1e-5 * ((rank.rank + step) % 3))
            optimizer.share(high - low)
            loss_of(model, rows(batch(size, step), low, high)).backward()
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        optimizer.close()
        return model, norms

    alone = PlainTraining(start, ADAMW, max_norm=0.05)
    norms = [alone.step(loss_of(alone.model, batch(size, step))) for step in range(STEPS)]
    late = NetworkModel(late_s=50e-6, eager_bytes=256)
    for seed in range(2):
        found = SimulatedRanks(nodes, seed, network=late).run(program)
        for model, own_norms in found:
            assert_close(model, alone.model, EXACT)
            assert own_norms == pytest.approx(norms, rel=EXACT)
        assert len({model_digest(model) for model, _ in found}) == 1


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_that_the_model_drops_after_their_mean_leave_nothing_behind(stage):
    """Neither their values, which are not finite, nor their samples in the weight of the next."""
    size, start = 3, net()

    def program(rank):
        model, (low, high) = copy.deepcopy(start), parts(size)[rank.rank : rank.rank + 2]
        collectives = rank.collectives.add_stream("the optimizer")
        optimizer = ZeroOptimizer(model, torch.optim.SGD, collectives, stage=stage, lr=0.1)
        own = rows(batch(size, 0), low, high)
        optimizer.backward(loss_of(model, own) * math.inf, weight=100.0 * (rank.rank + 1))
        model.zero_grad()
        optimizer.backward(loss_of(model, own), weight=high - low)
        optimizer.step()
        optimizer.close()
        return model

    alone = PlainTraining(start, partial(torch.optim.SGD, lr=0.1))
    alone.step(loss_of(alone.model, batch(size, 0)))
    for model in SimulatedRanks([2, 1]).run(program):
        assert_close(model, alone.model, EXACT)


class Copying(torch.optim.SGD):
    """Copies the parameters when it is made."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.copies = [p.clone() for group in self.param_groups for p in group["params"]]


def test_an_optimizer_of_a_model_is_made_with_rank_0s_values():
    def program(rank):
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, rank.rank)
        collectives = rank.collectives.add_stream("the optimizer")
        optimizer = ZeroOptimizer(model, Copying, collectives, stage=0)
        optimizer.close()
        return optimizer._inner.copies

    first, *others = SimulatedRanks([2, 1]).run(program)
    for copies in others:
        assert all(map(torch.equal, copies, first))
