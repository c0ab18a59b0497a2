import math
from types import SimpleNamespace

import pytest

from mntrain.checkpoint.objects import encode_objects, merge, select
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
