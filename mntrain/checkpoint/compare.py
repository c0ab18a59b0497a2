"""Comparison of two checkpoints, tensor by tensor, in blocks of bounded memory."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from mntrain.checkpoint.format import DTYPES, open_tensors
from mntrain.checkpoint.manifest import MODEL, OPTIMIZER, Manifest
from mntrain.config import flag_of, words_of

_BLOCK = 1 << 20  # elements, of which a few fp64 copies are made
_ABSENT = "absent"
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class TensorDifference:
    """Distance of a tensor from the other checkpoint's. NaN if only one of them has a NaN."""

    name: str
    largest: float  # largest absolute difference of an element
    relative: float  # L2 norm of the difference, divided by that of the first tensor


@dataclass(frozen=True)
class FileComparison:
    """Difference between the tensors of two files."""

    only: tuple[list[str], list[str]]  # names in the first file only, and in the second only
    mismatched: dict[str, tuple[str, str]]  # dtypes and shapes, where they differ
    equal: int  # number of tensors that are equal bit for bit
    changes: list[TensorDifference]  # of the others, the largest difference first

    @property
    def same(self) -> bool:
        """True if both files have the same tensors, bit for bit."""
        return not (any(self.only) or self.mismatched or self.changes)


@dataclass(frozen=True)
class CheckpointComparison:
    """Difference between two checkpoints; pairs are (first, second)."""

    steps: tuple[int, int]
    options: dict[str, tuple[str, str]]  # by command-line flag
    files: dict[str, FileComparison]
    values: dict[str, dict[str, tuple[Any, Any]]]  # optimizer values, by key and parameter

    @property
    def same_state(self) -> bool:
        """True if the models and the optimizers' states are equal, bit for bit."""
        return not self.values and all(file.same for file in self.files.values())


def compare(paths: tuple[Path, Path], contents: tuple[Manifest, Manifest]) -> CheckpointComparison:
    """Compare two checkpoints, whose files must have been verified."""
    first, second = contents
    values: dict[str, dict[str, tuple[Any, Any]]] = {}
    for (key, parameter), pair in _differing(_values(first), _values(second), {"value": _ABSENT}):
        values.setdefault(key, {})[parameter] = (pair[0]["value"], pair[1]["value"])
    return CheckpointComparison(
        (first.step, second.step),
        dict(_differing(_options(first), _options(second), _ABSENT)),
        {name: _compare_files(paths[0] / name, paths[1] / name) for name in (MODEL, OPTIMIZER)},
        values,
    )


def _compare_files(first_path: Path, second_path: Path) -> FileComparison:
    with open_tensors(first_path) as first, open_tensors(second_path) as second:
        a, b = _kinds(first), _kinds(second)
        only = (sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys()))
        common = [name for name in a if name in b]
        mismatched = {name: (a[name], b[name]) for name in common if a[name] != b[name]}
        differences = [
            _compare_tensors(name, first.get_tensor(name), second.get_tensor(name))
            for name in common
            if name not in mismatched
        ]
    # The largest first, those with a NaN before all others.
    changes = sorted(filter(None, differences), key=lambda c: (c.largest == c.largest, -c.largest))
    return FileComparison(only, mismatched, len(differences) - len(changes), changes)


def _kinds(file: safe_open) -> dict[str, str]:
    """Return dtype and shape of each tensor, as in "float32 (3, 4)"."""
    views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return {
        name: f"{DTYPES[view.get_dtype()]} {tuple(view.get_shape())}".removeprefix("torch.")
        for name, view in views.items()
    }


def _compare_tensors(name: str, first: Tensor, second: Tensor) -> TensorDifference | None:
    """Return the distance of two tensors of one dtype and shape; None if they are equal."""
    equal, largest = True, torch.zeros((), dtype=torch.float64)
    squared_distance = squared_norm = 0.0
    for a, b in zip(first.reshape(-1).split(_BLOCK), second.reshape(-1).split(_BLOCK), strict=True):
        squared_norm += a.double().square().sum().item()
        if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            continue
        equal = False
        gap = _gap(a.double(), b.double())
        largest = torch.maximum(largest, gap.abs().max())  # propagates NaN
        squared_distance += gap.square().sum().item()
    if equal:
        return None
    return TensorDifference(name, largest.item(), _relative(squared_distance, squared_norm))


def _gap(first: Tensor, second: Tensor) -> Tensor:
    """Return the difference, which is 0 where both are the same infinity or both NaN."""
    same = (first == second) | (first.isnan() & second.isnan())
    return (first - second).masked_fill_(same, 0.0)


def _relative(squared_distance: float, squared_norm: float) -> float:
    if squared_distance == 0:
        return 0.0
    if squared_norm == 0:
        return math.inf * squared_distance  # NaN if the distance is
    return math.sqrt(squared_distance / squared_norm)


def _options(content: Manifest) -> dict[str, str]:
    """Return the options of a run by their flags, as typed on the command line."""
    options: dict[str, str] = {}
    for section, value in content.config.items():
        fields = value if isinstance(value, Mapping) else {"": value}
        options |= {
            flag_of(f"{section}.{key}".rstrip(".")): " ".join(words_of(item))
            for key, item in fields.items()
        }
    return options


def _values(content: Manifest) -> dict[tuple[str, str], Any]:
    """Return the optimizer values that are not tensors of a parameter's shape."""
    return {
        (key, parameter): value
        for parameter, state in content.parameter_states.items()
        for key, value in state.others.items()
    }


def _differing(
    first: Mapping[K, V], second: Mapping[K, V], absent: V
) -> Iterator[tuple[K, tuple[V, V]]]:
    """Yield the keys whose values differ, with both values."""
    for key in {**first, **second}:
        pair = (first.get(key, absent), second.get(key, absent))
        if repr(pair[0]) != repr(pair[1]):  # by repr, because NaN differs from itself
            yield key, pair
