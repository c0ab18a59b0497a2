"""Distances between the recorded steps of two runs."""

from types import SimpleNamespace

import pytest
import torch

from mntrain.train.verify.recorded_steps import Distance, RecordedRun, RecordedStep
from mntrain.train.verify.verification import _wrong

DTYPES = {"layer": torch.bfloat16, "head": torch.float32}


@pytest.mark.parametrize("order", [["layer", "head"], ["head", "layer"]])
def test_a_rounding_of_the_whole_gradient_is_that_of_its_coarsest_parameter(order):
    gradients = {name: torch.ones(4, dtype=DTYPES[name]) for name in order}
    run = RecordedRun(first=RecordedRun(keeps=True))
    run.start = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    run._compare_gradients(gradients, RecordedStep(gradients=dict(gradients)))
    distances = run._step.distances
    assert distances["whole gradient"] == (0.0, torch.finfo(torch.bfloat16).eps)
    assert distances["gradient of head"] == (0.0, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize(
    ("dtype", "autocast", "rounding"),
    [
        (torch.float32, 0.0, 2.0**-23),
        (torch.float64, 0.0, 2.0**-23),
        (torch.bfloat16, 0.0, 2.0**-7),  # of a loss in the dtype of the model
        (torch.float32, 2.0**-10, 2.0**-10),
    ],
)
def test_a_loss_is_rounded_as_what_it_is_computed_in(dtype, autocast, rounding):
    def run(world, stage):
        world.recorded.steps.append(RecordedStep())
        return [1.0 if world.recorded.first is None else 1.25]

    world = SimpleNamespace(_shards=SimpleNamespace(samples=0, begin_anew=lambda: None))
    first = RecordedRun(keeps=True)
    first.record(run, world, 0)
    first.start, first.autocast = {"weight": torch.zeros(2, dtype=dtype)}, autocast
    other = RecordedRun(first)
    other.record(run, world, 0)
    assert other.steps[0].distances == {"loss": (0.25, rounding)}


@pytest.mark.parametrize("name", ["loss", "whole gradient", "weights of layer"])
def test_a_wrong_update_says_nothing_about_the_loss(name):
    run = RecordedRun(RecordedRun(keeps=True))
    run.steps = run.first.steps = [RecordedStep(distances={name: Distance(0.5, 1e-7)})]
    said = _wrong(run, iter([{}]), "; is Loss.count right?")
    assert said.startswith(f"in step 1, the difference in the {name} is 5.0e-01, ")
    assert said.endswith("Loss.count right?") != name.startswith("weights")
