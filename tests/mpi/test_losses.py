"""Two losses over different items in an own loop, against plain torch over whole batches."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from oracle import SGD, PlainTraining, assert_parity
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import make_world

pytestmark = pytest.mark.simulated

SAMPLES, BATCH, FACTOR = 23, 7, 0.3


def points(samples, seed):
    """Points, of which some have a class, and few have a score (NaN: none)."""
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(seed)).double()
    index = torch.arange(samples)
    classes = torch.where(index % 3 == 1, -1, index % 3)
    scores = torch.where(index % 8 == 0, x.sum(dim=1), math.nan)
    return TensorDataset(x, classes, scores)


class Heads(nn.Module):
    """A trunk with a head for classes and one for scores."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
        self.classes, self.scores = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x):
        features = self.trunk(x)
        return self.classes(features), self.scores(features).squeeze(1)


def errors(model, batch):
    """The loss of each class and of each score in a batch."""
    x, classes, scores = batch
    logits, predicted = model(x)
    known, scored = classes >= 0, ~scores.isnan()
    by_class = F.cross_entropy(logits[known], classes[known], reduction="none")
    return by_class, (predicted[scored] - scores[scored]).square()


@pytest.fixture(scope="module")
def world():
    with make_world() as world:
        yield world


@pytest.mark.parametrize("stage", [0, 2])
def test_sums_over_ranks_give_an_own_loop_the_same_gradient(world, stage):
    torch.manual_seed(3)
    model = Heads().double()
    optimizer = world.optimizer(model, SGD, stage=stage)
    alone = PlainTraining(model, SGD)
    loader = DataLoader(points(SAMPLES, 1), batch_size=BATCH, shuffle=True, drop_last=True)
    totals_seen = set()
    for batch in world.shard(loader):
        _, classes, scores = batch
        totals = world.sum([int((classes >= 0).sum()), int((~scores.isnan()).sum())])
        by_class, by_score = (part.sum() for part in errors(model, batch))
        loss = by_class / max(1, totals[0]) + FACTOR * by_score / max(1, totals[1])
        optimizer.backward(world.size * loss, weight=1)
        whole = [torch.cat(parts) for parts in zip(*world.gather(batch), strict=True)]
        sums = (part.sum() / max(1, len(part)) for part in errors(alone.model, whole))
        norm = alone.step(next(sums) + FACTOR * next(sums))
        assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-11)
        optimizer.zero_grad()
        totals_seen.add(tuple(totals))
    assert len(totals_seen) > 1
    assert_parity(world, model, alone)
    optimizer.close()
