"""Evaluations: their trial at the start, the best one, and when they end a run."""

import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mntrain.checkpoint.objects import encode_objects, merge, select
from mntrain.options.config import Config, TrainConfig
from mntrain.tasks import Loss, Mean, Sum, Task
from mntrain.train.evaluation import BestMetric, derived, try_evaluation
from mntrain.train.forward import Precision
from mntrain.train.job_data import JobData
from mntrain.train.step_means import GlobalMeans


def record(loss, **metrics):
    return SimpleNamespace(eval_loss=loss, eval_metrics=metrics)


@pytest.mark.parametrize(
    ("text", "score"),
    [("eval_loss", 2.0), ("accuracy:max", -0.75), ("errors", 9.0), ("errors:min", 9.0)],
)
def test_the_lowest_score_is_the_best_evaluation_if_there_is_one(text, score):
    assert BestMetric(text).score(record(2.0, accuracy=0.75, errors=9.0)) == score
    assert BestMetric(text).score(record(None)) is None
    assert BestMetric().score(record(2.0, eval_loss=9.0)) == 2.0  # not a metric of that name
    nan = math.nan
    assert BestMetric(text).score(record(nan, accuracy=nan, errors=nan)) is None
    refused = r"--checkpoint.best acc: .* they have eval_loss, accuracy$"
    with pytest.raises(ValueError, match=refused):
        BestMetric("acc").score(record(2.0, accuracy=0.5))


@pytest.mark.parametrize(
    ("best", "options"),
    [
        (BestMetric(patience=2), "--train.patience 2"),
        (BestMetric("acc:max"), "--checkpoint.best acc:max"),
        (BestMetric("acc", 1), "--train.patience 1 and --checkpoint.best acc"),
        (BestMetric(), ""),
    ],
)
def test_options_of_evaluations_without_validation_data_are_refused(best, options):
    data = SimpleNamespace(validation_sets=[])
    refused = pytest.raises(ValueError, match=f"^{options}: there is no validation data")
    with refused if options else nullcontext():
        try_evaluation(Task, nn.Linear(1, 1), data, None, best)


def evaluations_until_end(stopping, scores):
    for number, score in enumerate(scores, 1):
        if reason := stopping.after_evaluation(score):
            return number, reason
    return None


def test_a_run_ends_after_so_many_evaluations_without_a_better_one():
    found = evaluations_until_end(BestMetric(patience=3), [5, 4, 4, 6, 3, 3, None, 3.5, 1])
    assert found == (8, "no better evaluation in the last 3")
    assert evaluations_until_end(BestMetric(patience=0), [1.0] * 50) is None


@pytest.mark.parametrize("before", range(5))
def test_a_resumed_run_ends_after_the_same_evaluation(before):
    scores = [5, 4, 4, 6, 7, 3, 1]
    first, second = BestMetric(patience=3), BestMetric(patience=3)
    assert evaluations_until_end(first, scores[:before]) is None
    saved = merge([encode_objects({"stopping": first})])
    second.load_state_dict(select(saved, "stopping", 0, 1))
    number, _ = evaluations_until_end(second, scores[before:])
    assert before + number == 5


def test_after_a_checkpoint_with_another_metric_the_best_evaluation_is_sought_anew():
    first, second = BestMetric("accuracy:max", 2), BestMetric("eval_loss", 2)
    assert evaluations_until_end(first, [-0.9]) is None
    second.load_state_dict(first.state_dict())
    assert evaluations_until_end(second, [2.3, 2.0, 1.7, 1.8, 1.9]) == (
        5,
        "no better evaluation in the last 2",
    )


class Graded(Task):
    """Five points with labels for validation, under the name `valid_sets` gives them."""

    valid_sets = ("",)

    def model(self):
        return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def dataset(self, split):
        data = TensorDataset(torch.randn(5, 2), torch.randn(5, 1))
        return data if split == "train" else dict.fromkeys(self.valid_sets, data)

    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        x, y = batch
        return Loss((model(x) - y).square().mean(), len(x))


class Unreadable(Graded):
    def dataset(self, split):
        class WithoutLabels(TensorDataset):
            def __getitem__(self, index):
                raise KeyError("label")

        whole = super().dataset("train")
        return whole if split == "train" else {"news": WithoutLabels(*whole.tensors)}


class Uncollated(Graded):
    @staticmethod
    def collate(samples):
        return samples[99]


class Fails(Graded):
    def loss(self, model, batch):
        x, _ = batch
        assert x.dtype == torch.float64, "points must be\nfloat64"


class OfNoLoss(Graded):
    def loss(self, model, batch):
        return super().loss(model, batch).mean


class Nowhere(Graded):
    valid_sets = ()

    def loss(self, model, batch):
        raise AssertionError


def check(kind, micro_batch_size=2, best="eval_loss"):
    config = Config(task="own:Graded", train=TrainConfig(micro_batch_size=micro_batch_size))
    task = kind(config)
    nodes = SimpleNamespace(nodes=((0,),))
    world = SimpleNamespace(rank=0, size=1, topology=nodes, gather=lambda value: [value])
    model = task.model()
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    data = JobData(world, config, task, None)
    torch.set_rng_state(state)
    try:
        try_evaluation(task, model, data, Precision(), BestMetric(best))
    finally:
        assert task.calls == 0
        assert torch.equal(torch.get_rng_state(), state)
        assert [module.training for module in model.modules()] == [True, True, True, False, True]
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name


class Countless(Graded):
    """Its first micro-batch has nothing to take a mean over."""

    def loss(self, model, batch):
        return Loss(super().loss(model, batch).mean, 0)


@pytest.mark.parametrize("kind", [Graded, Nowhere, Countless])
@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_a_task_that_can_be_evaluated_passes_and_leaves_no_trace(kind, micro_batch_size):
    check(kind, micro_batch_size)


class Derives(Graded):
    """Has metrics that are computed of others, which not every batch can have."""

    valid_sets = ("news", "books")

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        errors = Mean(loss.mean, loss.count)
        return Loss(loss.mean, loss.count, {"errors": errors, "hits": Sum(0.0)})

    def derive(self, loss, metrics):
        return {"root": loss**0.5, "errors": metrics["errors"]}


class Divides(Derives):
    def derive(self, loss, metrics):
        return {"rate": 1 / metrics["hits"]}


class Lacks(Derives):
    def derive(self, loss, metrics):
        return {"rate": metrics["of another batch"]}


class Misspells(Graded):
    def derive(self, loss, metrics):
        return {"root": loss.sqrt()}


class ReturnsNothing(Graded):
    def derive(self, loss, metrics):
        metrics["root"] = loss**0.5


class ReturnsText(Graded):
    def derive(self, loss, metrics):
        return {"root": f"{loss**0.5:.3f}"}


def test_derived_metrics_are_numbers_of_any_kind_and_become_floats():
    values = {"a": np.float32(0.5), "b": torch.tensor([2]), "c": True, "d": np.int64(3), "e": 4}
    found = derived(SimpleNamespace(derive=lambda *_: values), GlobalMeans(1.0, {}, 5, ""))
    assert found == {"a": 0.5, "b": 2.0, "c": 1.0, "d": 3.0, "e": 4.0}
    assert {type(value) for value in found.values()} == {float}


@pytest.mark.parametrize(
    ("kind", "best", "names"),
    [
        (Graded, "accuracy:max", "eval_loss"),
        (Derives, "news root", None),
        (Derives, "books loss", None),
        (
            Derives,
            "root",
            "eval_loss, news loss, news root, news errors, books loss, books root, books errors",
        ),
        (Divides, "rate:max", None),  # the first evaluation will tell
        (Lacks, "rate:max", None),
    ],
)
def test_a_best_metric_that_evaluations_will_not_have_is_refused_at_the_start(kind, best, names):
    if names is None:
        check(kind, best=best)
        return
    words = f"--checkpoint.best {best}: the evaluations have no such metric; they have {names}"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        check(kind, best=best)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Unreadable, "an evaluation of the validation data news fails: KeyError: 'label' "),
        (Uncollated, "an evaluation of the validation data fails: IndexError: list index out"),
        (Fails, "an evaluation of the validation data fails: AssertionError: points must be"),
        (OfNoLoss, "returned a Tensor: return mntrain.tasks.Loss"),
        (Misspells, "derive() fails in an evaluation: AttributeError: 'float' object has no"),
        (ReturnsNothing, "derive() returned a NoneType: return a dict of numbers"),
        (ReturnsText, "' as root: return a number"),
    ],
)
def test_an_error_of_the_task_is_one_line_with_its_place(kind, sentence):
    with pytest.raises(ValueError, match=f"^--task own:Graded: .*{re.escape(sentence)}") as raised:
        check(kind)
    has_returned = kind in (OfNoLoss, ReturnsNothing, ReturnsText)
    line = re.search(r"\(\w+\.py, line \d+\)$", str(raised.value))
    assert has_returned == (line is None)
    assert has_returned or line[0].startswith("(test_evaluation.py,")
    assert "\n" not in str(raised.value)
