"""Sync schedules: the group of each step, and what is exchanged after it."""

import pytest
import torch
from torch import nn

from zero import SingleProcessCollectives, ZeroOptimizer
from zero.exchange.schedule import SyncSchedule


class Doubling(SyncSchedule):
    """Counts the steps of its group, and doubles parameters after every second step."""

    def __init__(self):
        self.sharding = SingleProcessCollectives()
        self.steps = []

    def group(self, step):
        self.steps.append(step)
        return self.sharding

    def exchange_due(self, step):
        return step % 2 == 1

    def exchange(self, tensors):
        for tensor in tensors:
            tensor.mul_(2)


def weight_of_1(dtype=torch.float32):
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.ones_(model.weight)
    return model


def make(model, **options):
    return ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, SingleProcessCollectives(), lr=0.25, **options
    )


def test_by_default_every_step_is_over_all_ranks():
    optimizer = make(weight_of_1())
    assert type(optimizer.schedule) is SyncSchedule
    assert optimizer.group is optimizer.schedule.sharding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_schedule_is_asked_for_each_step_and_may_change_parameters(stage, dtype):
    model, schedule = weight_of_1(dtype), Doubling()
    optimizer = make(model, stage=stage, schedule=schedule)
    weights = []
    for _ in range(4):
        model(torch.ones(1, 1, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [0.75, 1.0, 0.75, 1.0]
    assert sorted(set(schedule.steps)) == [0, 1, 2, 3, 4]  # the last one at the end of step 3


def test_the_number_of_steps_is_part_of_the_state():
    model = weight_of_1()
    optimizer = make(model, schedule=Doubling())
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    schedule = Doubling()
    resumed = make(model, schedule=schedule)
    resumed.load_state_dict(optimizer.state_dict())
    schedule.steps.clear()
    assert resumed.group is schedule.sharding
    assert schedule.steps == [3]
