"""Whether a checkpoint is of the run that a job continues."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mntrain.checkpoint import FoundCheckpoint
from mntrain.config import Config
from mntrain.errors import AgreedError
from mntrain.train.run_directory import check_same_run, to_json

WORLD = SimpleNamespace(rank=0)


def found(config, samples=7):
    return FoundCheckpoint(Path("step"), SimpleNamespace(config=config, samples=samples), {})


def without(*sections):
    return {name: value for name, value in to_json(Config()).items() if name not in sections}


def test_the_same_configuration_is_of_the_same_run():
    check_same_run(WORLD, found(to_json(Config())), Config(), 7)
    check_same_run(WORLD, found(without("comm", "zero")), Config(), 7)  # sections of later versions


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({}, "data, model, optim, run, task, train"),
        (without("task"), "task"),
        (without("model", "optim"), "model, optim"),
    ],
)
def test_a_configuration_without_sections_is_refused_by_name(config, missing):
    with pytest.raises(AgreedError) as error:
        check_same_run(WORLD, found(config), Config(), 7)
    assert f"its configuration has no {missing}; give another --run.dir" in str(error.value)


def test_options_that_differ_are_named():
    config = to_json(Config())
    config["run"]["seed"] = 5
    with pytest.raises(AgreedError, match=r"--run.seed was 5.* had 8 training samples, and has 7"):
        check_same_run(WORLD, found(config, samples=8), Config(), 7)
