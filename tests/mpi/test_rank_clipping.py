"""Gradients that each rank clips before the reduction, against torch on every rank's own part."""

import copy
import math
from functools import partial

import pytest
import torch
from model_digest import model_digest
from oracle import EXACT, OWN, loss_of, rows, samples
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero.shard import NonFiniteGradientError

pytestmark = pytest.mark.simulated

STEPS, LR = 4, 0.2


def make_model():
    torch.manual_seed(4)
    layers = nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)
    return nn.Sequential(*layers).double()


def parts_of(size, step):
    """The micro-batches of every rank in a step: the last rank has one, and others several."""
    batch, bounds = samples(60, seed=step), 0
    parts = []
    for rank in range(size):
        sizes = [3] if rank == size - 1 else [2, 4, 3][: 2 + rank % 2]
        micro_batches = []
        for count in sizes:
            x, y = rows(batch, bounds, bounds + count)
            # The gradients of some ranks are large, and of others below the limit.
            small = torch.full((count,), 0.02 if (rank + step) % 2 else 1.0, dtype=x.dtype)
            micro_batches.append((x, y, small))
            bounds += count
        parts.append(micro_batches)
    return parts


def scaled_loss(model, batch):
    """The mean over the samples of the losses times their factors."""
    x, y, factors = batch
    return (nn.functional.cross_entropy(model(x), y, reduction="none") * factors).mean()


def clipped_mean(model, losses, max_norm):
    """Give a model the mean of what each rank's own gradient is after clipping; return norms.

    `losses`: of each rank, the loss as a function of a model, and its weight.
    """
    totals, norms = [torch.zeros_like(p) for p in model.parameters()], []
    for loss, weight in losses:
        own = copy.deepcopy(model)
        loss(own).backward()
        gradients = list(own.parameters())
        norms.append(nn.utils.clip_grad_norm_(gradients, max_norm, foreach=False))
        for total, parameter in zip(totals, gradients, strict=True):
            total.add_(parameter.grad, alpha=weight)
    for total, parameter in zip(totals, model.parameters(), strict=True):
        parameter.grad = total / sum(weight for _, weight in losses)
    return norms


def losses_of(parts):
    batches = [tuple(map(torch.cat, zip(*part, strict=True))) for part in parts]
    return [(partial(scaled_loss, batch=batch), len(batch[0])) for batch in batches]


def check(model, reference):
    """Assert that a model has the weights of another one after a step of plain SGD."""
    torch.optim.SGD(reference.parameters(), lr=LR).step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


def accumulate(optimizer, model, micro_batches):
    """Run the backward passes of this rank."""
    *first, last = micro_batches
    for batch in first:
        with optimizer.no_sync():
            optimizer.backward(scaled_loss(model, batch), weight=len(batch[0]))
    optimizer.backward(scaled_loss(model, last), weight=len(last[0]))


@pytest.mark.parametrize(
    ("stage", "norm_type", "limit"),
    [
        (0, 2.0, None),
        (1, 2.0, 0.02),
        pytest.param(0, math.inf, 0.02, marks=pytest.mark.thorough),
        pytest.param(1, 1.0, None, marks=pytest.mark.thorough),
    ],
)
def test_each_rank_clips_its_own_mean(world, make, stage, norm_type, limit):
    model, reference = make_model(), make_model()
    limits = {"max_grad_norm": limit, "norm_type": norm_type}
    optimizer = make(model, torch.optim.SGD, lr=LR, stage=stage, **limits)
    optimizer.clip_each_rank(0.1)
    clipped = []
    for step in range(STEPS):
        parts = parts_of(world.size, step)
        accumulate(optimizer, model, parts[world.rank])
        result = optimizer.step()
        optimizer.zero_grad()
        norms = clipped_mean(reference, losses_of(parts), 0.1)
        clipped += [float(norm) > 0.1 for norm in norms]
        whole = nn.utils.clip_grad_norm_(
            reference.parameters(), limit or math.inf, norm_type, foreach=False
        )
        assert result.grad_norm == pytest.approx(float(whole), rel=1e-9)
        check(model, reference)
    assert set(clipped) == {True, False}
    assert len(set(world.gather(model_digest(model)))) == 1


@pytest.mark.parametrize(("stage", "absent"), [(0, 0), (1, 0), (1, 1)])
def test_one_backward_is_clipped_and_a_rank_without_samples_counts_nothing(
    world, make, stage, absent
):
    ranks = world.size - absent
    if not ranks:
        pytest.skip("some rank needs a sample")
    model, reference = make_model(), make_model()
    optimizer = make(model, torch.optim.SGD, lr=LR, stage=stage)
    optimizer.clip_each_rank(0.05)
    batch = *samples(4 * ranks, seed=9), torch.ones(4 * ranks)
    parts = [[rows(batch, 4 * rank, 4 * rank + 4)] for rank in range(ranks)]
    if absent:
        optimizer.share(4 if world.rank < ranks else 0)
    if world.rank < ranks:
        scaled_loss(model, parts[world.rank][0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(norm > 0.05 for norm in clipped_mean(reference, losses_of(parts), 0.05))
    check(model, reference)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [0, 1])
def test_a_layer_that_is_used_in_several_checkpoints_is_clipped_once(worlds, stage):
    world = worlds("lanes", 2, OWN)
    model, reference = make_model(), make_model()
    optimizer = world.optimizer(model, torch.optim.SGD, lr=LR, stage=stage)
    optimizer.clip_each_rank(0.05)

    def loss(model, rank):
        x, y = rows(batch, 4 * rank, 4 * rank + 4)
        x = model[0](x)
        for _ in range(2):  # reentrant: its backward calls backward
            x = x + checkpoint(model[2:], x, use_reentrant=True).sum(1, keepdim=True)
        return nn.functional.cross_entropy(model[2:](x), y)

    batch = samples(4 * world.size, seed=9)
    loss(model, world.rank).backward()
    optimizer.step()
    clipped_mean(reference, [(partial(loss, rank=rank), 1) for rank in range(world.size)], 0.05)
    check(model, reference)
    optimizer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(world, make, value):
    model = make_model()
    optimizer = make(model, torch.optim.SGD, lr=LR)
    optimizer.clip_each_rank(0.05)
    x, y = samples(4, seed=1)
    loss = loss_of(model, (x, y)) * (value if world.rank == world.size - 1 else 1.0)
    loss.backward()
    with pytest.raises(NonFiniteGradientError, match=rf"on rank {world.size - 1}$"):
        optimizer.step()
    optimizer.zero_grad()


def test_clipping_ends_and_what_cannot_be_clipped_is_refused(world, make):
    model = make_model()
    optimizer = make(model, torch.optim.SGD, lr=LR)
    for wrong in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="give a number above 0, or None"):
            optimizer.clip_each_rank(wrong)
    optimizer.clip_each_rank(1e-9)
    optimizer.clip_each_rank(None)
    loss_of(model, samples(4)).backward()
    assert optimizer.step().grad_norm > 1e-6
    optimizer.zero_grad()
    sharded = make(make_model(), torch.optim.SGD, lr=LR, stage=2)
    with pytest.raises(ValueError, match="at stage 2, no rank has the whole"):
        sharded.clip_each_rank(1.0)
