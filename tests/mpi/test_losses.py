"""Several losses with counts of their own, against plain torch over the whole of every batch."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from job import metrics
from mpi4py import MPI
from oracle import SGD, PlainTraining, assert_parity
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import RANKS, make_world

from mntrain.data.sampling import SamplingPlan
from mntrain.options.config import Config, OptimConfig, RunConfig, TrainConfig, ZeroConfig
from mntrain.tasks import Losses, Mean, Sum, Task
from mntrain.train.step_agreement import StepAgreement
from mntrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.simulated]

RANK = MPI.COMM_WORLD.rank
SAMPLES, BATCH, STEPS, FACTOR = 23, 7, 8, 0.3  # the last batch of an epoch has two samples


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


def whole_batch(model, batch):
    """The means of a whole batch by name, without those over nothing; and the loss."""
    by_class, by_score = errors(model, batch)
    means = {"classes": by_class.mean(), "scores": by_score.mean()}
    means = {name: mean for name, mean in means.items() if not mean.isnan()}
    return means, sum(mean * (FACTOR if name == "scores" else 1) for name, mean in means.items())


class Both(Task):
    def model(self):
        return Heads().double()

    def dataset(self, split):
        if split == "train":
            return points(SAMPLES, 1)
        x, classes, scores = points(11, 2).tensors
        first, rest = slice(0, 9), slice(9, None)  # the rest has no scores
        return {
            name: TensorDataset(x[rows], classes[rows], scores[rows])
            for name, rows in (("first", first), ("rest", rest))
        }

    def optimizer(self, model):
        return partial(SGD.func, model.parameters(), **SGD.keywords)

    def counts(self, batch):
        _, classes, scores = batch
        return {"classes": int((classes >= 0).sum()), "scores": int((~scores.isnan()).sum())}

    def loss(self, model, batch):
        by_class, by_score = errors(model, batch)
        parts = {
            "classes": Mean(by_class.mean(), len(by_class)),  # NaN over nothing
            "scores": Mean(by_score.mean(), len(by_score)),
        }
        return Losses(parts, {"scores": FACTOR}, {"worst": Sum(by_class.sum())}, len(batch[0]))


@pytest.fixture(scope="module")
def world():
    with make_world() as world:
        yield world


def configure(folder: Path, stage: int, task: str) -> Config:
    return Config(
        task=f"{__name__}:{task}",
        device="cpu",
        train=TrainConfig(
            steps=STEPS, batch_size=BATCH, micro_batch_size=2, eval_samples=0, check_every=1
        ),
        optim=OptimConfig(max_grad_norm=None, schedule="constant", warmup_steps=0),
        zero=ZeroConfig(stage=stage),
        run=RunConfig(dir=folder / "run"),
    )


def plain_loop():
    """The lines of metrics.jsonl by torch alone, with every batch as one."""
    torch.manual_seed(0)
    task = Both(None)
    alone = PlainTraining(task.model(), SGD)
    tensors = task.dataset("train").tensors
    plan = SamplingPlan(SAMPLES, BATCH, seed=0)
    lines = []
    for step in range(STEPS):
        rows = plan.share(step, 0, 1)
        batch = [t[rows] for t in tensors]
        means, loss = whole_batch(alone.model, batch)
        line = {"loss": loss.item(), "metrics": {name: m.item() for name, m in means.items()}}
        line["metrics"]["worst"] = errors(alone.model, batch)[0].sum().item()
        lines.append({**line, "grad_norm": alone.step(loss), "samples": len(rows)})
    return lines, alone.model


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_step_is_that_of_the_whole_batch(world, tmp_path, stage):
    assert Trainer(world, configure(tmp_path, stage, "Both")).fit()["status"] == "completed"
    if not world.master:
        return
    expected, model = plain_loop()
    scored = ["scores" in line["metrics"] for line in expected]
    assert any(scored)
    assert not all(scored)  # a part is absent from some steps
    lines = metrics(tmp_path)
    assert len(lines) == STEPS
    for line, right in zip(lines, expected, strict=True):
        assert {name: line[name] for name in right} == {
            name: pytest.approx(value, rel=1e-9) for name, value in right.items()
        }
    # The evaluation after the last step.
    validation = Both(None).dataset("valid")
    with torch.no_grad():
        both = points(11, 2).tensors
        assert lines[-1]["eval_loss"] == pytest.approx(whole_batch(model, both)[1].item(), rel=1e-9)
        for name, dataset in validation.items():
            means, loss = whole_batch(model, dataset.tensors)
            found = lines[-1]["eval_metrics"]
            assert found[f"{name} loss"] == pytest.approx(loss.item(), rel=1e-9)
            for part in ("classes", "scores"):
                right = means.get(part)
                assert found.get(f"{name} {part}") == (
                    right if right is None else pytest.approx(right.item(), rel=1e-9)
                )


class Breaks(Both):
    """Raises on the last rank at the place that `at` names, once training has begun."""

    at = ""

    def dataset(self, split):
        dataset = super().dataset(split)
        if split == "train":
            dataset = Fragile(*dataset.tensors)
        return dataset

    def counts(self, batch):
        break_at("counts")
        return super().counts(batch)

    def loss(self, model, batch):
        break_at("loss")
        return super().loss(model, batch)


class Fragile(TensorDataset):
    def __getitem__(self, index):
        break_at("load")
        return super().__getitem__(index)


def break_at(place):
    if Breaks.at == place and RANK == RANKS - 1:
        raise KeyError(f"a bug in {place}")


class StepEndedError(Exception):
    pass


@pytest.mark.parametrize("step", [1, 2])  # before and after ranks know the names of all parts
@pytest.mark.parametrize("place", ["load", "counts", "loss"])
def test_all_ranks_end_a_step_that_fails_on_one(world, tmp_path, monkeypatch, place, step):
    def end_if_failed(agreement, number):
        assert agreement._failed == (number == step)
        if agreement._failed:
            assert (agreement._error is not None) == (RANK == RANKS - 1)
            raise StepEndedError

    monkeypatch.setattr(StepAgreement, "end_if_failed", end_if_failed)
    trainer = Trainer(world, configure(tmp_path, 2, "Breaks"))
    for number in range(1, step):
        trainer.train_step(number)
    monkeypatch.setattr(Breaks, "at", place)
    with pytest.raises(StepEndedError):
        trainer.train_step(step)
    assert world.sum([1.0]) == [RANKS]  # no collective is left over


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
