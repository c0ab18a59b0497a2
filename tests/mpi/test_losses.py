"""Two losses over different items in an own loop, against plain torch over whole batches."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from oracle import SGD, PlainTraining, assert_parity
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.simulated

FACTOR = 0.3


def points(samples):
    """Points, of which some have a class (-1: none), and few have a score (NaN: none)."""
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(1)).double()
    index = torch.arange(samples)
    classes = torch.where(index % 3 == 1, -1, index % 3)
    return TensorDataset(x, classes, torch.where(index % 8 == 0, x.sum(dim=1), math.nan))


def errors(model, batch):
    """The loss of each class and of each score in a batch."""
    x, classes, scores = batch
    out = model(x)
    known, scored = classes >= 0, ~scores.isnan()
    by_class = F.cross_entropy(out[known, :3], classes[known], reduction="none")
    return by_class, (out[scored, 3] - scores[scored]).square()


@pytest.mark.parametrize("stage", [0, 2])
def test_sums_over_ranks_give_an_own_loop_the_same_gradient(world, make, stage):
    model = nn.Linear(5, 4).double()
    optimizer = make(model, SGD, stage=stage)
    alone = PlainTraining(model, SGD)
    loader = DataLoader(points(23), batch_size=7, shuffle=True, drop_last=True)
    for batch in world.shard(loader):
        by_class, by_score = errors(model, batch)
        classes, scores = (max(1, n) for n in world.sum([len(by_class), len(by_score)]))
        loss = by_class.sum() / classes + FACTOR * by_score.sum() / scores
        optimizer.backward(world.size * loss, weight=1)
        whole = [torch.cat(parts) for parts in zip(*world.gather(batch), strict=True)]
        by_class, by_score = errors(alone.model, whole)
        norm = alone.step(by_class.mean() + FACTOR * by_score.sum() / max(1, len(by_score)))
        assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-11)
        optimizer.zero_grad()
    assert_parity(world, model, alone)
