"""Means over the items of a step, and over those of several validation sets."""

import math

import pytest
import torch

from mntrain.errors import TrainingStoppedError
from mntrain.tasks import Loss, Mean
from mntrain.train.evaluation import merge_sets
from mntrain.train.step_means import StepMeans
from zero import SingleProcessCollectives

GROUP = SingleProcessCollectives()


def test_the_loss_of_several_validation_sets_is_that_of_their_items_together():
    sets = {
        "x": Loss(torch.tensor(1.0), 3, {"a": Mean(torch.tensor(7.0), 2)}),
        "y": Loss(torch.tensor(5.0), 1, {"a": Mean(torch.tensor(0.0), 0)}),
    }
    by_set = {}
    means = StepMeans(0)
    for name, loss in sets.items():
        means.add_loss(loss)
        by_set[name] = means.reduce(GROUP, "in evaluation")
    assert merge_sets(by_set) == (2.0, {"x loss": 1.0, "x a": 7.0, "y loss": 5.0})


def test_means_start_anew_after_a_reduction_and_leave_out_empty_batches():
    means = StepMeans(0)
    for accuracy in (0.5, 0.75):
        means.add(3, {"loss": torch.tensor(2.0), "accuracy": torch.tensor(accuracy)})
        means.add(1, {"loss": torch.tensor(4.0)})
        means.add(0, {"loss": torch.tensor(math.nan)})
        reduced = means.reduce(GROUP, "in step 1")
        assert (reduced.loss, reduced.count) == (2.5, 4)
        assert reduced.metrics == {"accuracy": accuracy}  # of the three items that have one
    with pytest.raises(TrainingStoppedError, match="in step 2, no rank has anything"):
        means.reduce(GROUP, "in step 2")
