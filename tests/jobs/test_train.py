"""Jobs that learn: of a compiled model, and of the example of an own loop."""

import sys
from pathlib import Path

import pytest
from job import completed, losses, losses_alone, train
from launch import mpirun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.exhaustive
def test_a_compiled_model_follows_the_plain_one(tmp_path):
    options = ["--model.layers", "1", "--train.eval-samples", "12"]  # few shapes to compile for
    completed(train(1, tmp_path, *options, "--train.compile", timeout=250))
    assert losses(tmp_path) == pytest.approx(losses_alone(*options), rel=1e-4)


@pytest.mark.exhaustive
def test_a_loop_of_ones_own():
    result = completed(mpirun(2, [sys.executable, EXAMPLES / "own_loop.py"], timeout=250))
    values = [float(line.split()[3]) for line in result.stdout.splitlines() if "loss" in line]
    assert len(values) == 20
    assert values[-1] < 0.1 * values[0]
