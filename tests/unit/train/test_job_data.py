"""The data of a job: what a task may bring, and where a resumed run continues in it."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from sharding import data_of, world_of
from torch.utils.data import IterableDataset, TensorDataset

from mntrain.checkpoint import FoundCheckpoint
from mntrain.data.sampling import BEGIN, Position
from mntrain.options.balance import BalanceConfig
from mntrain.options.config import Config, TrainConfig
from mntrain.train.job_data import _find_origin


class EndlessStream:
    """Data that can be indexed, of an unknown length."""

    def __getitem__(self, index):
        return index


class Unending(IterableDataset):
    """Numbers without an end."""

    def __iter__(self):
        return itertools.count()


def points(count):
    return TensorDataset(torch.zeros(count, 2))


@pytest.mark.parametrize(
    ("train", "valid", "which"),
    [
        (EndlessStream(), None, "training"),
        (points(3), EndlessStream(), "validation"),
        (points(3), {"news": EndlessStream()}, "validation news"),
    ],
)
def test_data_without_a_length_are_refused(train, valid, which):
    said = (
        f"^the {which} data of --task own:Task is a EndlessStream without a length: give a dataset"
    )
    with pytest.raises(ValueError, match=said):
        data_of(world_of(), train, valid)


@pytest.mark.parametrize(
    ("valid", "sets"),
    [
        (None, []),
        (points(0), []),
        ({}, []),
        ({"news": points(0), "code": None}, []),
        ({"news": points(0), "code": points(2)}, ["code"]),
    ],
)
def test_there_need_be_no_validation_and_sets_without_samples_are_left_out(valid, sets):
    data = data_of(world_of(), points(3), valid)
    assert data.validation_sets == sets
    assert list(data.datasets) == ["training", *(f"validation {name}" for name in sets)]


def test_errors_name_the_samples_of_micro_batches_that_are_divided_in_another_way():
    numbers = torch.arange(40)
    data = data_of(world_of(), TensorDataset(numbers), None)

    def divided(lists):
        samples = [sample for one in lists for sample in one]
        return [[sample] for sample in reversed(samples)]

    for step, micro_batches in enumerate(data.batches_of_ranks(2, 2, divided), 1):
        found = [data.name_micro_batch(step, number) for number in range(len(micro_batches))]
        assert found == [f"sample {int(x)} of the training data" for (x,) in micro_batches]


@pytest.mark.parametrize(
    ("train", "valid", "said"),
    [
        (points(1064), None, "1,064 training and no validation samples; 100 steps are 2.94 epochs"),
        (points(64), points(5), "64 training and 5 validation samples; 100 steps are 50 epochs"),
        (
            points(33),  # 32 and 1
            {"news": points(1000), "code": points(2), "none": points(0)},
            "33 training and 1,002 validation samples; 100 steps are 50 epochs",
        ),
        (Unending(), None, "a stream to train on, and no validation samples"),
        (Unending(), points(5), "a stream to train on, and 5 validation samples"),
    ],
)
def test_the_data_are_described_by_their_numbers(train, valid, said):
    assert data_of(world_of(), train, valid).describe(100) == f"data: {said}"


def test_epochs_become_steps_where_they_can_be_counted():
    assert data_of(world_of(), points(65)).steps(TrainConfig(epochs=2)) == 6  # of 32, 32 and 1
    assert data_of(world_of(), points(65)).steps(TrainConfig(steps=7)) == 7
    found = FoundCheckpoint(None, SimpleNamespace(step=5, position=(1, 20)), {})  # 45 are left
    resumed = data_of(world_of(), points(65), resumed=found)
    assert resumed.steps(TrainConfig(epochs=3)) == 5 + 2 + 3
    assert data_of(world_of(), Unending()).steps(TrainConfig()) == 200
    said = "^--train.epochs 2: the training data is an IterableDataset, .*; give --train.steps$"
    with pytest.raises(ValueError, match=said):
        data_of(world_of(), Unending()).steps(TrainConfig(epochs=2))
    cadence = Config(task="own:Task", balance=BalanceConfig(mode="cadence"))
    with pytest.raises(
        ValueError, match=r"^--train.epochs 2: with --balance.mode cadence, .* give"
    ):
        data_of(world_of(), points(650), config=cadence).steps(TrainConfig(epochs=2))


@pytest.mark.parametrize(
    ("position", "samples", "origin"),
    [
        ((2, 8), 9, Position(5, 2, 8)),
        ((2, 8), 8, Position(5, 3, 0)),  # the epoch has none left
        ((2, 8), 3, Position(5, 3, 0)),
        (None, 10, Position(5, 0, 0)),  # of an earlier version
    ],
)
def test_a_resumed_run_continues_after_the_samples_that_it_has_seen(position, samples, origin):
    manifest = SimpleNamespace(step=5, position=position)
    assert _find_origin(FoundCheckpoint(None, manifest, {}), samples) == origin
    assert _find_origin(None, samples) == BEGIN


def test_micro_batches_that_are_divided_otherwise_have_all_samples_of_the_step():
    config = Config(task="own:Task", train=TrainConfig(batch_size=5, micro_batch_size=1))
    points = TensorDataset(torch.arange(5), torch.zeros(5))
    data = data_of(world_of(), points, config=config)
    batches = data.batches_of_ranks(
        1, 1, lambda lists: [lists[0], [s for one in lists[1:] for s in one]]
    )
    for one, others in batches:
        assert len(one[0]) == 1
        assert sorted([*one[0].tolist(), *others[0].tolist()]) == [0, 1, 2, 3, 4]
