"""Cutting of whole batches: which entries are columns, and what is refused."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sharding import concatenated, epoch_of
from torch.utils.data import DataLoader, TensorDataset

Pair = namedtuple("Pair", "x y")


@dataclass
class Named:
    x: torch.Tensor
    scale: float


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_iterable_of_batches_is_sliced(size):
    spans = [torch.arange(start, stop) for start, stop in [(0, 4), (4, 5), (5, 12)]]
    for got, span in zip(concatenated([(x, -x) for x in spans], size), spans, strict=True):
        assert torch.equal(got[0], span)
        assert torch.equal(got[1], -span)


def test_nested_batches_are_sliced_and_keep_their_types():
    x = torch.arange(5)
    batch = {
        "pair": Pair(x, [x + 1, x.numpy()]),
        "named": Named(x[:, None], 0.5),
        "words": ["a", "b", "c", "d", "e"],
        "scalar": torch.tensor(3.0),
        "note": "all",
    }
    [(got, share)] = epoch_of([batch], rank=1, size=2)
    assert share == 3
    assert type(got["pair"]) is Pair
    assert got["pair"].x.tolist() == got["named"].x[:, 0].tolist() == [2, 3, 4]
    assert got["pair"].y[0].tolist() == [3, 4, 5]
    assert isinstance(got["pair"].y[1], np.ndarray)
    assert got["pair"].y[1].tolist() == [2, 3, 4]
    assert got["named"].scale == 0.5
    assert got["words"] == ["c", "d", "e"]
    assert (got["scalar"].item(), got["note"]) == (3.0, "all")
    assert len(batch["words"]) == len(batch["pair"].x) == 5


class Reversed(DataLoader):
    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


TEN = torch.arange(10)


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (Reversed(TEN, batch_size=4), [[9], [6, 7], [2, 3]]),
        (Reversed(TensorDataset(TEN, 2 * TEN), batch_size=4), [[9], [6, 7], [2, 3]]),
        (Reversed([str(i) for i in range(10)], batch_size=4), [["9"], ["6", "7"], ["2", "3"]]),
        (
            DataLoader(TensorDataset(TEN[:6].view(2, 3)), batch_size=None, collate_fn=tuple),
            [[1, 2], [4, 5]],
        ),
    ],
    ids=["subclass with its own order", "its columns", "strings", "no batch sampler"],
)
def test_loaders_that_cannot_be_rebuilt_are_cut(loader, expected):
    got = [batch for batch, _ in epoch_of(loader, rank=1, size=2)]
    columns = [x[0] if isinstance(x[0], torch.Tensor) and x[0].dim() else x for x in got]
    assert [x.tolist() if isinstance(x, torch.Tensor) else list(x) for x in columns] == expected


IMAGES = [torch.full((3, 4, 4), float(i)) for i in range(5)]
WORDS = [{"text": str(i), "ids": torch.arange(i)} for i in range(5)]


@pytest.mark.parametrize(
    "batch",
    [
        WORDS,
        [(image, i) for i, image in enumerate(IMAGES)],
        [list(range(i)) for i in range(5)],
        [Named(torch.zeros(i), 1.0) for i in range(5)],
        [torch.tensor(float(i)) for i in range(5)],
        [None, "a", "b", None, "c"],
        [0.5, 1, 2, 3, 4],
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_list_of_samples_is_cut_by_sample(batch, size):
    """Also as the only list of a mapping, and beside a tensor with one row a sample."""
    beside = torch.arange(5)
    for nest, of in [
        (batch, lambda part: part),
        ({"samples": batch, "note": "all"}, lambda part: part["samples"]),
        ((batch, beside, ()), lambda part: part[0]),
    ]:
        parts = [epoch_of([nest], rank, size)[0] for rank in range(size)]
        together = [sample for part, share in parts if share for sample in of(part)]
        assert len(together) == 5
        assert all(one is other for one, other in zip(together, batch, strict=True))
        assert all(of(part)[0] is batch[0] for part, share in parts if not share)


class Opaque:
    pass


NESTED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("error", "batch", "message"),
    [
        (ValueError, (torch.zeros(4), torch.zeros(3)), r"this tuple have \[3, 4\]"),
        (ValueError, {"a": 1}, "this dict have none"),
        (ValueError, torch.zeros(0, 3), "no samples"),
        (TypeError, IMAGES, "list of 5 tensors may be 5 samples"),
        (TypeError, {"x": [torch.zeros(8, 1), torch.zeros(8, 1)]}, "or a tuple of columns"),
        (TypeError, [torch.zeros(8)], "list of 1 tensors may be"),
        (TypeError, (torch.zeros(2, 3), (1, 0)), "tuple of 2 numbers"),
        (TypeError, Opaque(), "a batch with a Opaque cannot"),
        (
            TypeError,
            {"x": torch.zeros(3), "graph": Opaque()},
            "a batch with a Opaque cannot",
        ),
        (TypeError, {1, 2, 3}, "a batch with a set cannot be cut"),
        (TypeError, (torch.eye(3).to_sparse(), torch.zeros(3)), "with a sparse tensor cannot be"),
        (TypeError, {"x": NESTED}, "a batch with a nested tensor cannot be cut"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(error, batch, message):
    with pytest.raises(error, match=message):
        epoch_of([batch], 0, 2)
