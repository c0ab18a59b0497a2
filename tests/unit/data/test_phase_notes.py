"""The note of an exception in a job: rank, phase and samples."""

import traceback

import pytest
import torch
from sharding import data_of, sharded, world_of
from torch.utils.data import Dataset, IterableDataset

from mntrain.data.phase_notes import name_samples, noted
from mntrain.data.sampling import LoaderOptions, SampleOrder, step_loader
from mntrain.options.config import Config, TrainConfig

BROKEN = 7


class Labelless(Dataset):
    """13 samples, of which one cannot be loaded. At module level, for spawned workers."""

    def __len__(self):
        return 13

    def __getitem__(self, index):
        if index == BROKEN:
            raise KeyError("label")
        return index


class LabellessTogether(Labelless):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class BrokenStream(IterableDataset):
    def __iter__(self):
        yield from range(5)
        raise KeyError("label")


def collated(samples):
    if BROKEN in samples:
        raise ValueError("of unequal lengths")
    return samples


def error_of(steps):
    """The text of the error of the next step, whose frames would keep the workers."""
    try:
        next(steps)
    except (KeyError, ValueError) as error:
        text = "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)
        return text


def config():
    return Config(task="own:Task", train=TrainConfig(batch_size=4, micro_batch_size=2))


def holding(order, sample):
    """The micro-batch that has a sample, with its rank and its step."""
    for step in range(order.steps_per_epoch):
        for rank in range(2):
            for samples in order.micro_batches(step, rank, 2, 2):
                if sample in samples:
                    return samples, rank, step
    raise AssertionError


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("dataset", "collate", "phase", "all_of_it"),
    [
        (Labelless(), None, "loading", False),
        (LabellessTogether(), None, "loading", True),
        (range(13), collated, "collating", True),
    ],
)
def test_a_sample_that_fails_is_noted_once(dataset, collate, phase, all_of_it, workers):
    order = SampleOrder(13, 6, seed=3)
    samples, rank, step = holding(order, BROKEN)
    options = LoaderOptions(
        rank=rank, micro_batch_size=2, workers=workers, start_method="fork", collate=collate
    )
    loader = step_loader(dataset, order, options, range(order.steps_per_epoch))
    steps = iter(sharded(loader, rank, 2, train=True))
    for _ in range(step):
        next(steps)
    text, said = error_of(steps), name_samples(samples if all_of_it else [BROKEN], "training data")
    assert text.count(f"mntrain: rank {rank}: {phase} {said}\n") == 1
    assert text.count("mntrain: ") == 1
    assert "label" in text or "of unequal lengths" in text


def test_a_validation_sample_is_noted_by_its_index_in_the_dataset():
    found = data_of(world_of(1, 2), Labelless(), {"news": Labelless()}, config=config())
    with pytest.raises(KeyError) as raised:
        list(found.validation_batches("news"))
    assert raised.value.__notes__ == [
        "mntrain: rank 1: loading sample 7 of the validation data news"
    ]


@pytest.mark.parametrize(
    ("stream", "collate", "notes"),
    [
        (BrokenStream(), None, ["reading the training stream in step 2"]),
        (
            range(100),
            collated,
            [
                "collating 2 samples of the training stream",
                "reading the training stream in step 2",
            ],
        ),
    ],
)
def test_a_stream_that_fails_is_noted_with_the_step(stream, collate, notes):
    class GivenStream(IterableDataset):
        def __iter__(self):
            return iter(stream)

    world = world_of(1, 2, gather=lambda value: [value, value])
    found = data_of(world, GivenStream(), config=config(), collate=collate)
    with pytest.raises((KeyError, ValueError)) as raised:
        list(found.batches(0, 2))
    assert raised.value.__notes__ == [f"mntrain: rank 1: {note}" for note in notes]


def test_a_stream_without_a_sample_is_refused():
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    found = data_of(world_of(), Nothing(), config=config())
    with pytest.raises(ValueError, match="the training stream has no samples"):
        list(found.batches(0, 2))


def test_many_samples_are_not_all_listed():
    assert name_samples([5], "training data") == "sample 5 of the training data"
    assert name_samples([9, 3, 4, 5], "data") == "samples 3 to 5, 9 of the data"
    assert name_samples(range(0, 200, 2), "data").endswith(" 60, 62 and 68 more of the data")


def test_a_single_sample_of_a_last_batch_that_batch_norm_cannot_take_is_explained():
    with pytest.raises(ValueError, match="more than 1 value") as raised, noted(1, "forward"):
        torch.nn.BatchNorm1d(2)(torch.ones(1, 2))
    phase, hint = raised.value.__notes__
    assert phase == "mntrain: rank 1: forward"
    assert "give --data.drop-last to leave that out" in hint
