"""A task that brings its optimizer, schedule, metrics and callbacks, against a plain torch loop."""

import math
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from job import completed, metrics, summary
from launch import mpirun

from mntrain.checkpoint.reader import inspect, list_checkpoints
from mntrain.data.sampling import SampleOrder

STEPS, BATCH, SAMPLES, VALID = 30, 12, 53, 21

TASK = f"""
import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from mntrain.tasks import Loss, Max, Mean, Sum, Task


def points(count, seed):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


class Points(Task):
    def model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
        ).double()

    def dataset(self, split):
        return points({SAMPLES}, 1) if split == "train" else points({VALID}, 2)

    def optimizer(self, model):
        groups = [{{"params": model[0].parameters()}},
                  {{"params": model[2].parameters(), "lr": 0.01}}]
        return partial(torch.optim.SGD, groups, lr=0.05, momentum=0.9)

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=[0.2, 0.05], total_steps={STEPS} + 1)

    def loss(self, model, batch):
        x, labels = batch
        logits = model(x.double())
        right = logits.argmax(dim=1) == labels
        ones = labels == 1
        return Loss(F.cross_entropy(logits, labels), len(x), {{
            "accuracy": right.double().mean(),
            "recall": Mean(right[ones].double().mean(), int(ones.sum())),
            "errors": Sum((~right).sum()),
            "farthest": Max(x.norm(dim=1).max()),
        }})

    def derive(self, loss, metrics):
        return {{**metrics, "perplexity": math.exp(loss)}}

    def on_checkpoint(self, path):
        with Path("saved.txt").open("a") as file:
            print(path.name, file=file)


class Sets(Points):
    def dataset(self, split):
        whole = super().dataset(split)
        if split == "train":
            return whole
        rows = lambda *bounds: TensorDataset(*(t[slice(*bounds)] for t in whole.tensors))
        return {{"first": rows(0, 6), "rest": rows(6, None), "none": rows(0, 0)}}
"""

OPTIONS = [
    *("--task", "own:Points", "--train.steps", str(STEPS), "--train.batch-size", str(BATCH)),
    *("--train.micro-batch-size", "4", "--train.eval-every", "5", "--train.eval-samples", "0"),
    *("--optim.max-grad-norm", "none", "--device", "cpu", "--run.dir", "run"),
]


def train(ranks, folder, *options):
    (folder / "own.py").write_text(TASK)
    command = [sys.executable, "-m", "mntrain", *OPTIONS, *options]
    return mpirun(ranks, command, cwd=folder, timeout=250)


def load_task():
    scope = {}
    exec(compile(TASK, "own.py", "exec"), scope)
    return scope["Points"](config=None)


@cache
def plain_loop():
    """The losses, learning rates and evaluations of torch alone, with the whole batch at once."""
    task = load_task()
    torch.manual_seed(0)
    model = task.model()
    make = task.optimizer(model)
    optimizer = make()
    schedule = task.schedule(optimizer)
    x, labels = task.dataset("train").tensors
    order = SampleOrder(SAMPLES, BATCH, seed=0)
    found, evaluations = [], {}
    for step in range(STEPS):
        rows = order.share(step, 0, 1)
        loss = F.cross_entropy(model(x[rows].double()), labels[rows])
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
    loss = F.cross_entropy(logits, labels).item()
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


def expect_plain(folder: Path) -> None:
    found, evaluations = plain_loop()
    lines = metrics(folder)
    assert [line["loss"] for line in lines] == pytest.approx([x for x, _ in found], rel=1e-9)
    assert [line["lr"] for line in lines] == pytest.approx([lr for _, lr in found], rel=1e-12)
    evaluated = {line["step"]: line for line in lines if "eval_loss" in line}
    assert evaluated.keys() == evaluations.keys()
    for step, expected in evaluations.items():
        line = evaluated[step]
        assert line["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-9)
        assert line["eval_metrics"] == pytest.approx(expected["eval_metrics"], rel=1e-6)


@pytest.mark.thorough
def test_a_task_trains_as_plain_torch_and_goes_on_at_another_size_and_stage(tmp_path):
    saves = ["--checkpoint.every", "4"]
    first = train(3, tmp_path, *saves, "--zero.stage", "2", "--run.stop-after", "13")
    said = "optimizer: SGD of the task, schedule OneCycleLR of the task"
    assert said in completed(first).stdout
    completed(train(2, tmp_path, *saves, "--zero.stage", "1"))
    expect_plain(tmp_path)
    told = (tmp_path / "saved.txt").read_text().split()
    assert told[:2] == ["step-00000004", "step-00000005"]  # every 4 steps, and the best
    assert told[-1] == f"step-{STEPS:08d}"
    assert len(told) == len(set(told))
    assert {path.name for path in list_checkpoints(tmp_path / "run")} <= set(told)


@pytest.mark.exhaustive
def test_the_best_checkpoint_by_a_metric_of_one_of_several_validation_sets_is_kept(tmp_path):
    saves = ["--task", "own:Sets", "--checkpoint.every", "100", "--checkpoint.keep", "1"]
    best = ["--checkpoint.best", "first accuracy:max", "--train.patience", "2"]
    completed(train(2, tmp_path, *saves, *best))
    _, evaluations = plain_loop()
    lines = metrics(tmp_path)
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
    whole = summary(tmp_path)
    assert whole["status"] == "stopped"
    assert whole["reason"] == "no better evaluation in the last 2"
    assert len(lines) == highest + 10 < STEPS
    kept = [inspect(path).step for path in list_checkpoints(tmp_path / "run")]
    assert kept == [highest + 10, highest]
