"""Digests of samples: what makes a difference, and what does not."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from mntrain.alike.sample_digest import fields_of, of_samples, spread_digest

FLOATS = torch.linspace(-1, 1, 3000)


@dataclass
class Item:
    image: torch.Tensor
    label: int


DIFFERENT = [
    (torch.arange(5), torch.arange(5).roll(1)),
    (torch.arange(6), torch.arange(6).reshape(2, 3)),
    (torch.arange(5), torch.arange(5, dtype=torch.int32)),
    (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    (FLOATS, FLOATS * 1.01),
    (torch.tensor(1.0), torch.tensor(float("nan"))),
    (torch.tensor(True), torch.tensor(False)),
    (np.arange(3), np.arange(1, 4)),
    (np.float32(1), np.float32(2)),
    (np.array([1 + 2j]), np.array([1 + 3j])),
    (1, 2),
    (1.0, 2.0),
    (True, 1),
    (None, 0),
    ("a", "b"),
    (b"a", b"b"),
    (["ab", "c"], ["a", "bc"]),
    ((1, 2), (1, 2, 3)),
    ({"x": torch.ones(2)}, {"x": torch.zeros(2)}),
    ({"x": 1}, {"y": 1}),
    ({1, 2}, {1, 3}),
    (Item(torch.ones(1), 1), Item(torch.ones(1), 2)),
    (object(), [object()]),
]
SAME = [
    (FLOATS, FLOATS * (1 + 1e-6)),  # rounded by another processor
    (torch.tensor(float("nan")), torch.tensor(float("nan"))),
    (torch.zeros(2), torch.zeros(2)),
    (torch.tensor([]), torch.tensor([])),
    (torch.arange(6).reshape(2, 3).T, torch.tensor([[0, 3], [1, 4], [2, 5]])),
    ({2, 1, "a"}, {"a", 1, 2}),
    (
        {"x": 1.0, "y": 2.0},
        {"y": 2.0, "x": 1.0},
    ),  # made from a set, of another order in each process
    (Path("/node1/data/a.png"), Path("/elsewhere/a.png")),
    ("/node1/data/a.png", "/elsewhere/a.png"),
    (object(), object()),
    (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),  # of its content nothing is read
]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [*((*pair, False) for pair in DIFFERENT), *((*pair, True) for pair in SAME)],
)
def test_samples_that_differ_have_other_digests_and_equal_ones_have_one(one, other, same):
    assert (fields_of([one]) == fields_of([other])) == same


class Generating(Dataset):
    """So many numbers; it notes those that were drawn, and holds what an access opens."""

    def __init__(self, count, draw=lambda index: index):
        self.count, self.draw, self.drawn = count, draw, []
        self.own = random.Random(1), np.random.default_rng(1)
        self.generator = random.Random(1)
        self.torchs = torch.Generator().manual_seed(1)
        self.file = None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.drawn.append(index)
        self.file = object()
        self.generator.random()
        torch.rand(1, generator=self.torchs)
        return self.draw(index)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda d: d,
        lambda d: Subset(d, range(4)),
        lambda d: ConcatDataset([d, TensorDataset(FLOATS)]),
    ],
    ids=["bare", "subset", "concatenated"],
)
def test_drawing_leaves_the_dataset_and_the_default_generators_as_they_were(wrapped):
    dataset = Generating(4, lambda index: (random.random(), np.random.rand(), torch.rand(1)))
    states = random.getstate(), dataset.generator.getstate()
    torchs = torch.get_rng_state(), dataset.torchs.get_state()
    numpys = np.random.get_state()[1].tolist()
    found = of_samples(wrapped(dataset), [0, 2])
    assert dataset.drawn
    assert dataset.file is None
    assert (random.getstate(), dataset.generator.getstate()) == states
    assert torch.equal(torch.get_rng_state(), torchs[0])
    assert torch.equal(dataset.torchs.get_state(), torchs[1])
    assert np.random.get_state()[1].tolist() == numpys
    random.random()
    assert found.again() == found.content  # random, and yet the same
    assert len(found.content["[0]"]) == 2


def test_a_sample_that_cannot_be_drawn_counts_as_its_exception_and_a_whole_dataset_not_at_all():
    class Whole(Generating):
        def __copy__(self):
            raise TypeError("there is one of me")

    def draw(index):
        raise FileNotFoundError(f"/node1/{index}.png")

    found = of_samples(Generating(1, draw), [0])
    assert found.content == fields_of(["FileNotFoundError"])
    assert found.failure == "FileNotFoundError: /node1/0.png (sample 0)"
    assert of_samples(Whole(3), [0]).content == {}


class Rows(Dataset):
    """Rows of a tensor, whose second field is drawn by a generator of its own."""

    def __init__(self, rows):
        self.rows, self.read = rows, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.read += 1
        return self.rows[index], float(np.random.default_rng().normal()), torch.rand(())


class Endless(IterableDataset):
    def __len__(self):
        return 9

    def __iter__(self):
        return iter(range(9))


def test_a_digest_of_evenly_spread_samples_is_that_of_their_fixed_fields():
    data = Rows(torch.arange(100))
    found = spread_digest(data)
    assert found.keys() == {"[0]", "[2]"}  # the default generators are seeded
    assert (found, data.read) == (spread_digest(Rows(torch.arange(100))), 0)
    assert all(len(digest) == 12 for digest in found.values())


@pytest.mark.parametrize(
    "other",
    [
        torch.arange(100).flip(0),
        torch.arange(100) + 1,
        torch.arange(100).float(),
        torch.arange(100).where(torch.arange(100) < 99, 0),
        torch.arange(101),
    ],
)
def test_other_data_have_another_digest(other):
    assert spread_digest(Rows(torch.arange(100)))["[0]"] != spread_digest(Rows(other))["[0]"]


def test_a_float_has_another_digest_if_any_bit_differs():
    nearly = FLOATS.clone()
    nearly[0] += 1e-7
    assert spread_digest(TensorDataset(FLOATS)) != spread_digest(TensorDataset(nearly))


@pytest.mark.parametrize("data", [Endless(), iter([1]), [], Rows(torch.arange(0)), range])
def test_data_without_an_index_have_no_digest(data):
    assert spread_digest(data) == {}


def test_lists_of_samples_and_of_batches_have_a_digest():
    batches = [(torch.arange(3) + i, ["a", "b", "c"]) for i in range(4)]
    assert spread_digest(batches).keys() == {"[0]", "[1]"}
    assert spread_digest(batches) != spread_digest(batches[::-1])
    assert spread_digest([1]) != spread_digest([2])
