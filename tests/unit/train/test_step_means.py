"""Means over the items of a step, and what a task may say about their counts."""

import math
from types import SimpleNamespace

import pytest
import torch

from mntrain.comm.waits import Waits
from mntrain.errors import TrainingStoppedError
from mntrain.metrics.registry import StepTimer
from mntrain.options.config import Config
from mntrain.tasks import Loss, Losses, Mean, Task
from mntrain.train.evaluation import merge_sets
from mntrain.train.step_means import PartCounts, StepMeans
from zero import SingleProcessCollectives

GROUP = SingleProcessCollectives()
TIMER = StepTimer(SimpleNamespace(busy_s=0.0, waited_s=0.0))


class OneLoss(Task):
    def model(self):
        return torch.nn.Linear(1, 1)

    def dataset(self, split):
        return None

    def loss(self, model, batch):
        return Loss(torch.tensor(2.0), 3)


class Several(OneLoss):
    """Losses and counts are the batch."""

    def loss(self, model, batch):
        return Losses({name: Mean(torch.tensor(1.0), n) for name, n in batch[0].items()})

    def counts(self, batch):
        return batch[1]


def weighed(task, *batches):
    """The weighted mean of what a step passes to backward, over its micro-batches."""
    group = SimpleNamespace(gather_objects=lambda own, _: SimpleNamespace(wait=lambda: [own]))
    counts = PartCounts(task(Config()), "mine:Task", lambda: group, Waits())
    counts.start(batches)
    pairs = []
    for batch in batches:
        loss = counts.checked(task(Config()).loss(None, batch))
        pairs.append(counts.weigh(loss, TIMER))
    counts.end_step()
    return sum(float(value) * weight for value, weight in pairs) / sum(w for _, w in pairs)


def test_a_task_with_one_loss_communicates_no_counts():
    counts = PartCounts(OneLoss(Config()), "mine:Task", lambda: pytest.fail("gathers"), Waits())
    counts.start([1, 2])
    loss = OneLoss(Config()).loss(None, 1)
    assert counts.weigh(counts.checked(loss), TIMER) == (loss.mean, 3)
    counts.end_step()
    counts.finish_interrupted()


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"a": 3, "b": 2}, {"a": 3, "b": 5}),
        ({"a": 3, "b": 2}, {"a": 3}),
        ({"a": 3}, {"a": 3, "b": 2}),
    ],
)
def test_losses_with_other_counts_than_those_summed_are_refused(returned, said):
    words = (
        rf"--task mine:Task returned Losses with {returned.get('b', 0)} items of the part b, but "
        rf"counts\(\) said {said.get('b', 0)}"
    )
    with pytest.raises(ValueError, match=words):
        weighed(Several, (returned, said))


def test_a_part_may_be_left_out_where_its_count_is_0():
    assert weighed(Several, ({"a": 3, "b": 0}, {"a": 3}), ({"a": 1}, {"a": 1, "b": 0})) == 1.0


@pytest.mark.parametrize("said", [None, [3], {"a": 3.0}, {"a": -3}, {1: 3}])
def test_counts_that_are_no_numbers_of_items_are_refused(said):
    with pytest.raises(TypeError, match=r"counts\(\) of --task mine:Task returned .*: return a"):
        weighed(Several, ({"a": 3}, said))


def test_losses_without_counts_and_counts_without_losses_are_refused():
    class Forgets(Several):
        counts = Task.counts

    class Mixes(OneLoss):
        def counts(self, batch):
            return {"a": 1}

    for task, batch, returned in ((Forgets, ({"a": 3}, {}), "Losses"), (Mixes, 1, "Loss")):
        words = (
            rf"--task mine:Task returned {returned}\. A task that returns Losses must have counts"
        )
        with pytest.raises(TypeError, match=words):
            weighed(task, batch)


def test_the_loss_of_several_validation_sets_is_that_of_their_items_together():
    parts = {"a": Mean(torch.tensor(1.0), 3), "b": Mean(torch.tensor(7.0), 2)}
    sets = {
        "x": Losses(parts, {"b": 0.5}),
        "y": Losses({"a": Mean(torch.tensor(5.0), 1), "b": Mean(torch.tensor(0.0), 0)}),
    }
    by_set = {}
    means = StepMeans(0)
    for name, losses in sets.items():
        means.add_loss(losses)
        by_set[name] = means.reduce(GROUP, "in evaluation")
    assert merge_sets(by_set) == (
        2.0 + 0.5 * 7.0,
        {"x loss": 4.5, "x a": 1.0, "x b": 7.0, "y loss": 5.0, "y a": 5.0},
    )
    for items, count in ((None, 5), (11, 11)):  # those that the task names, or those of all parts
        means.add_loss(Losses(parts, items=items))
        assert means.reduce(GROUP, "in step 1").count == count


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
