"""Distances between the recorded steps of two runs."""

import pytest
import torch

from mntrain.train.verify.recorded_steps import RecordedRun, RecordedStep

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
