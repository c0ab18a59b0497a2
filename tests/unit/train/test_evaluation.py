import math
from types import SimpleNamespace

import pytest
import torch

from mntrain.checkpoint.objects import encode_objects, merge, select
from mntrain.tasks import Loss, Losses, Max, Mean, Sum, Task
from mntrain.train.evaluation import BestMetric, EarlyStopping


def record(loss, **metrics):
    return SimpleNamespace(eval_loss=loss, eval_metrics=metrics)


@pytest.mark.parametrize(
    ("text", "score"),
    [("eval_loss", 2.0), ("accuracy:max", -0.75), ("errors", 9.0), ("errors:min", 9.0)],
)
def test_the_lowest_score_is_the_best_evaluation(text, score):
    assert BestMetric(text).score(record(2.0, accuracy=0.75, errors=9.0)) == score


def test_a_step_without_an_evaluation_and_a_value_that_is_no_number_have_no_score():
    assert BestMetric("accuracy:max").score(record(None)) is None
    assert BestMetric("accuracy:max").score(record(2.0, accuracy=math.nan)) is None


def test_a_metric_that_there_is_not_is_refused_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"--checkpoint.best acc: .* they have eval_loss, accuracy$"
    ):
        BestMetric("acc").score(record(2.0, accuracy=0.5))


def evaluations_until_end(stopping, scores):
    for number, score in enumerate(scores, 1):
        if reason := stopping.after_evaluation(score):
            return number, reason
    return None


def test_a_run_ends_after_so_many_evaluations_without_a_better_one():
    found = evaluations_until_end(EarlyStopping(3), [5, 4, 4, 6, 3, 3, None, 3.5, 1])
    assert found == (8, "no better evaluation in the last 3")


def test_without_patience_a_run_never_ends():
    stopping = EarlyStopping(0)
    assert not stopping.enabled
    assert evaluations_until_end(stopping, [1.0] * 50) is None


@pytest.mark.parametrize("before", range(5))
def test_a_resumed_run_ends_after_the_same_evaluation(before):
    scores = [5, 4, 4, 6, 7, 3, 1]
    first, second = EarlyStopping(3), EarlyStopping(3)
    assert evaluations_until_end(first, scores[:before]) is None
    saved = merge([encode_objects({"stopping": first})])
    second.load_state_dict(select(saved, "stopping", 0, 1))
    number, _ = evaluations_until_end(second, scores[before:])
    assert before + number == 5


def test_after_a_checkpoint_with_another_metric_the_best_evaluation_is_sought_anew():
    first, second = EarlyStopping(2, "accuracy:max"), EarlyStopping(2, "eval_loss")
    assert evaluations_until_end(first, [-0.9]) is None
    second.load_state_dict(first.state_dict())
    assert evaluations_until_end(second, [2.3, 2.0, 1.7, 1.8, 1.9]) == (
        5,
        "no better evaluation in the last 2",
    )


class Plain(Task):
    """Has no metric but those of its loss."""

    model = dataset = loss = None


class Derives(Plain):
    """Counts its calls, and divides only by what there is."""

    def derive(self, loss, metrics):
        self.calls += 1
        found = {"perplexity": math.exp(loss)}
        if metrics["errors"]:
            found["ratio"] = 1 / metrics["errors"]
        return found


class Fails(Plain):
    def derive(self, loss, metrics):
        return {"ratio": 1 / (metrics["errors"] - 1)}


RIGHT = Loss(
    torch.tensor(2.0),
    3,
    {
        "worst": Max(torch.tensor(1.0)),
        "errors": Sum(0.0),
        "accuracy": torch.tensor(0.5),
        "recall": Mean(math.nan, 0),
    },
)
FEW = Loss(torch.tensor(2.0), 3, {"errors": Sum(0.0)})
PARTS = Losses({"box": Mean(torch.tensor(1.0), 2), "mask": Mean(torch.tensor(0.0), 0)})


def tried(text, kind=Plain, **losses):
    task = kind(None)
    task.calls = 0
    try:
        BestMetric(text).check_trial(task, losses or {"": RIGHT})
    finally:
        assert task.calls == 0
    return True


@pytest.mark.parametrize("name", ["eval_loss", "accuracy:max", "recall:max", "worst", "errors:min"])
def test_a_metric_that_the_trial_of_the_validation_data_has_passes(name):
    assert tried(name)


@pytest.mark.parametrize(
    ("text", "kind", "losses", "names"),
    [
        ("recal:max", Plain, {}, "accuracy, errors, recall, worst"),
        ("errors", Derives, {}, "perplexity, ratio"),
        (
            *("errors", Plain, {"near": RIGHT, "far": FEW}),
            "near loss, near accuracy, near errors, near recall, near worst, far loss, far errors",
        ),
    ],
)
def test_a_metric_that_no_evaluation_can_have_is_refused_by_the_trial(text, kind, losses, names):
    said = f"--checkpoint.best {text}: the evaluations have no such metric; they have eval_loss, "
    fix = r" \(one that .* in all, there as Mean\(0\.0, 0\)\)$"
    with pytest.raises(ValueError, match=said + names + fix):
        tried(text, kind, **losses)


def test_derived_metrics_and_those_of_one_of_several_sets_pass_the_trial():
    assert tried("perplexity", Derives)
    assert tried("ratio:max", Derives)  # also where there was nothing to divide by
    assert tried("far errors", near=RIGHT, far=FEW)
    assert tried("near loss", near=RIGHT, far=FEW)


def test_losses_that_a_micro_batch_lacks_are_not_missed_in_the_trial():
    assert tried("rare:min", **{"": PARTS})


def test_nothing_is_refused_without_validation_data_or_if_metrics_cannot_be_derived():
    BestMetric("acc").check_trial(Plain(None), {})
    assert tried("acc", Fails)
