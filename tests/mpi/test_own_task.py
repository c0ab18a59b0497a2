"""A task that brings its optimizer, schedule, metrics and callbacks, against a plain torch loop."""

import math
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from job import lines_of, summary_of
from mpi4py import MPI
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from worlds import RANKS, first_ranks, meet

import mntrain
from mntrain.checkpoint.reader import inspect, list_checkpoints
from mntrain.data.sampling import SampleOrder
from mntrain.options.config import (
    CheckpointConfig,
    Config,
    OptimConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
)
from mntrain.tasks import Loss, Max, Mean, Sum, Task
from mntrain.train.entry import exit_code
from mntrain.train.trainer import Trainer

pytestmark = pytest.mark.simulated

STEPS, BATCH, SAMPLES, VALID = 30, 12, 53, 21


def points(count, seed):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


class Points(Task):
    told = Path()  # the file in which callbacks are noted

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    def dataset(self, split):
        return points(SAMPLES, 1) if split == "train" else points(VALID, 2)

    def optimizer(self, model):
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}]
        return partial(torch.optim.SGD, groups, lr=0.05, momentum=0.9)

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.2, 0.05], total_steps=STEPS + 1
        )

    def loss(self, model, batch):
        x, labels = batch
        logits = model(x.double())
        right, ones = logits.argmax(dim=1) == labels, labels == 1
        metrics = {
            "accuracy": right.double().mean(),
            "recall": Mean(right[ones].double().mean(), int(ones.sum())),
            "errors": Sum((~right).sum()),
            "farthest": Max(x.norm(dim=1).max()),
        }
        return Loss(functional.cross_entropy(logits, labels), len(x), metrics)

    def derive(self, loss, metrics):
        return {**metrics, "perplexity": math.exp(loss)}

    def on_checkpoint(self, path):
        with self.told.open("a") as file:
            print(path.name, file=file)


class Sets(Points):
    def dataset(self, split):
        whole = super().dataset(split)
        if split == "train":
            return whole

        def rows(*bounds):
            return TensorDataset(*(column[slice(*bounds)] for column in whole.tensors))

        return {"first": rows(0, 6), "rest": rows(6, None), "none": rows(0, 0)}


@pytest.fixture
def train(folder, monkeypatch):
    """Runs a job of a task on the first ranks, for which the others wait."""
    monkeypatch.setattr(Points, "told", folder / "saved.txt")

    def run(ranks, task, stage=0, stop_after=None, patience=0, **checkpoint):
        config = Config(
            task=f"{__name__}:{task}",
            device="cpu",
            optim=OptimConfig(max_grad_norm=None),
            train=TrainConfig(
                steps=STEPS,
                batch_size=BATCH,
                micro_batch_size=4,
                eval_every=5,
                eval_samples=0,
                patience=patience,
            ),
            zero=ZeroConfig(stage=stage),
            checkpoint=CheckpointConfig(**checkpoint),
            run=RunConfig(dir=folder / "run", stop_after=stop_after),
        )
        with first_ranks(ranks) as comm:
            if comm is not None:
                with mntrain.init(comm, device="cpu") as world:
                    assert exit_code(Trainer(world, config).fit()) == 0
        meet()

    return run


@cache
def plain_loop():
    """The losses, learning rates and evaluations of torch alone, with the whole batch at once."""
    task = Points(Config())
    model = task.model()
    optimizer = task.optimizer(model)()
    schedule = task.schedule(optimizer)
    x, labels = task.dataset("train").tensors
    order = SampleOrder(SAMPLES, BATCH, seed=0)
    found, evaluations = [], {}
    for step in range(STEPS):
        rows = order.share(step, 0, 1)
        loss = functional.cross_entropy(model(x[rows].double()), labels[rows])
        found.append((loss.item(), optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 5 == 0:
            evaluations[step + 1] = evaluate(model, task.dataset("valid"))
    return found, evaluations


@torch.no_grad()
def evaluate(model, dataset):
    x, labels = dataset.tensors
    logits = model(x.double())
    right = logits.argmax(dim=1) == labels
    loss = functional.cross_entropy(logits, labels).item()
    return {
        "eval_loss": loss,
        "eval_metrics": {
            "accuracy": right.double().mean().item(),
            "recall": right[labels == 1].double().mean().item(),
            "errors": (~right).sum().item(),
            "farthest": x.norm(dim=1).max().item(),
            "perplexity": math.exp(loss),
        },
    }


def test_a_task_trains_as_plain_torch_and_goes_on_at_another_size_and_stage(train, folder, capsys):
    train(RANKS, "Points", stage=2, stop_after=13, every="4")
    said = capsys.readouterr().out
    assert ("SGD of the task, schedule OneCycleLR of the task" in said) == (
        MPI.COMM_WORLD.rank == 0
    )
    train(RANKS - 1, "Points", stage=1, every="4")
    found, evaluations = plain_loop()
    lines = lines_of(folder / "run")
    assert [line["loss"] for line in lines] == pytest.approx([x for x, _ in found], rel=1e-9)
    assert [line["lr"] for line in lines] == pytest.approx([lr for _, lr in found], rel=1e-12)
    evaluated = {line["step"]: line for line in lines if "eval_loss" in line}
    assert evaluated.keys() == evaluations.keys()
    for step, expected in evaluations.items():
        line = evaluated[step]
        assert line["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-9)
        assert line["eval_metrics"] == pytest.approx(expected["eval_metrics"], rel=1e-6)
    told = (folder / "saved.txt").read_text().split()
    assert told[:2] == ["step-00000004", "step-00000005"]  # every 4 steps, and the best
    assert told[-1] == f"step-{STEPS:08d}"
    assert len(told) == len(set(told))
    assert {path.name for path in list_checkpoints(folder / "run")} <= set(told)


def test_the_best_checkpoint_by_a_metric_of_one_of_several_validation_sets_is_kept(train, folder):
    train(RANKS, "Sets", patience=2, every="100", keep=1, best="first accuracy:max")
    _, evaluations = plain_loop()
    lines = lines_of(folder / "run")
    evaluated = [line for line in lines if "eval_loss" in line]
    for line in evaluated:
        whole, sets = evaluations[line["step"]], line["eval_metrics"]
        assert line["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-9)
        both = (6 * sets["first loss"] + 15 * sets["rest loss"]) / 21
        assert both == pytest.approx(whole["eval_loss"], rel=1e-9)
        errors = sets["first errors"] + sets["rest errors"]
        assert errors == whole["eval_metrics"]["errors"]
        assert {name.split()[0] for name in sets} == {"first", "rest"}
        assert sets["first perplexity"] == pytest.approx(math.exp(sets["first loss"]))
    accuracies = [line["eval_metrics"]["first accuracy"] for line in evaluated]
    highest = evaluated[accuracies.index(max(accuracies))]["step"]  # the first of them
    whole = summary_of(folder / "run")
    assert (whole["status"], whole["reason"]) == ("stopped", "no better evaluation in the last 2")
    assert len(lines) == highest + 10 < STEPS
    kept = [inspect(path).step for path in list_checkpoints(folder / "run")]
    assert kept == [highest + 10, highest]
