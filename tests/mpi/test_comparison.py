"""The comparison over ranks of a task, its data, and an own loop's options."""

import argparse
import itertools
import os
import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch.utils.data import Dataset
from worlds import BUT_LAST, RANKS, make_world, refusal

from mntrain.alike.compared_task import compare_task
from mntrain.options.config import Config
from mntrain.tasks import Task

CALLS = itertools.count(os.getpid())
pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def world():
    with make_world() as made:
        yield made


class FourSamples(Dataset):
    """Four samples by a function of the index."""

    def __init__(self, draw, count=4):
        self.draw, self.count = draw, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.draw(index)


class ComparedTask(Task):
    files: Mapping[str, Path] = MappingProxyType({})
    model = dataset = loss = None

    def compared_files(self):
        return self.files


def compare(world, draw, count=4, valid=lambda index: index):
    task = ComparedTask(Config())
    datasets = {"training": FourSamples(draw, count), "validation": FourSamples(valid)}
    compare_task(world, ComparedTask, task.compared_values, task.compared_files, datasets)


def odd(world, usual, other):
    return other if world.rank == RANKS - 1 else usual


@pytest.mark.parametrize(
    "draw",
    [
        lambda index: (torch.ones(3) * index, str(index)),
        lambda index: torch.rand(5) + random.random(),
        pytest.param(lambda index: os.urandom(8), marks=pytest.mark.exhaustive),
        pytest.param(lambda index: next(CALLS), marks=pytest.mark.exhaustive),
        lambda index: 1 / 0,
    ],
    ids=["constant", "random", "by the system", "by calls", "failing"],
)
def test_data_is_accepted_if_it_is_the_same_or_random(world, draw):
    compare(world, draw)
    compare(world, lambda index: index, valid=draw)


@pytest.mark.parametrize(
    ("usual", "other", "field"),
    [
        (lambda i: i, lambda i: i + (i == 2), ""),
        (lambda i: (i, torch.ones(i)), lambda i: (i, torch.zeros(i)), " in [1]"),
        (lambda i: (i, os.urandom(4)), lambda i: (-i, os.urandom(4)), " in [0]"),
    ],
    ids=["middle", "content", "among random ones"],
)
def test_another_sample_on_one_rank_is_named(world, usual, other, field):
    said = refusal(compare, world, odd(world, usual, other))
    name = f"the samples of the training data on rank {RANKS - 1} differ from those on rank 0"
    assert said.startswith(f"{name}{field}: ")
    assert "of the validation data" not in said


def test_the_error_of_samples_that_one_rank_alone_cannot_read_is_told(world):
    said = refusal(compare, world, odd(world, str, lambda i: 1 / 0))
    cannot = f"rank {RANKS - 1} cannot read samples of the training data that others can: "
    assert said == f"{cannot}ZeroDivisionError: division by zero (sample 0)"


def test_the_first_the_middle_and_the_last_sample_are_drawn(world):
    drawn = []
    compare(world, drawn.append, count=101)
    assert drawn[:3] == [0, 50, 100]
    later = [*dict.fromkeys(drawn[3:])]  # by rank 0 alone, for the digest in checkpoints
    assert len(later) == (8 if world.master else 0)
    assert later == sorted(later)


def test_another_number_of_samples_is_named(world):
    said = refusal(compare, world, lambda index: index, odd(world, 4, 5))
    name = "the number of training samples"
    assert said.startswith(f"{name} differs between ranks: {BUT_LAST} 4, rank {RANKS - 1} has 5: ")


def test_a_value_of_the_task_that_differs_is_named(world, monkeypatch):
    given = {"the tokenizer": odd(world, "bytes", "sha256 b")}
    monkeypatch.setattr(ComparedTask, "compared_values", lambda task: given)
    said = refusal(compare, world, lambda index: index)
    differ = f"the tokenizer differs between ranks: {BUT_LAST} bytes, rank {RANKS - 1} has sha256 b"
    assert said.startswith(f"{differ}: ")


def test_files_of_a_task_are_compared_and_one_that_is_missing_is_told(world, tmp_path, monkeypatch):
    (tmp_path / "a").write_text(odd(world, "usual", "another"))
    monkeypatch.setattr(ComparedTask, "files", {"a": tmp_path / "a"})
    said = refusal(compare, world, int)
    assert said.startswith(f"the size of a differs between ranks: {BUT_LAST} 5 bytes, rank")
    monkeypatch.setattr(ComparedTask, "files", {"a": tmp_path / odd(world, "a", "b")})
    assert refusal(compare, world, int).startswith(f"rank {RANKS - 1}: [Errno 2] No such file")


def metrics(world, folder, config):
    world.metrics(folder, config).close()


@pytest.fixture
def run(world, tmp_path):
    return world.gather(tmp_path / "run")[0]


def test_an_own_loops_options_that_differ_are_named(world, run):
    config = argparse.Namespace(lr=odd(world, 0.1, 0.2), net={"width": 3, "depth": [1, world.rank]})
    said = refusal(world.metrics, run, vars(config))
    first, second = said.split("; ")
    assert first == f"config lr differs between ranks: {BUT_LAST} 0.1, rank {RANKS - 1} has 0.2"
    assert second.startswith("config net.depth differs between ranks: rank 0 has [1, 0], rank 1")
    assert said.endswith(
        ": give all ranks the same, and leave out of config what is of one rank only"
    )
    assert not run.exists()


def test_an_own_loops_options_may_differ_in_what_is_of_one_rank(world, run):
    objects = {"function": lambda: None, "device": torch.device("cpu"), "object": object()}
    own = {"rank": world.rank, "local-rank": world.rank, "device": str(world.rank)}
    metrics(world, run, {"lr": 0.1, **objects, **own, "nan": float("nan")})


def test_options_that_rank_0_alone_gives_are_accepted(world, run):
    metrics(world, run, {"lr": 0.1} if world.master else None)
    assert (run / "config.toml").read_text() == "lr = 0.1\n"
