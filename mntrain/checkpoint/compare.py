"""Comparison of two checkpoints, tensor by tensor, in blocks of bounded memory."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mntrain.checkpoint.format import DTYPES, open_tensors
from mntrain.checkpoint.manifest import MODEL, OPTIMIZER, Manifest, ParameterState
from mntrain.config import flag_of, words_of

_BLOCK = 1 << 20  # elements, of which a few fp64 copies are made
_ABSENT = "absent"


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
    options = _options(first.config), _options(second.config)
    return CheckpointComparison(
        (first.step, second.step),
        {
            flag: pair
            for flag in options[0] | options[1]
            if (pair := (options[0].get(flag, _ABSENT), options[1].get(flag, _ABSENT)))
            and pair[0] != pair[1]
        },
        {name: _compare_files(paths[0] / name, paths[1] / name) for name in (MODEL, OPTIMIZER)},
        _compare_values(first.parameter_states, second.parameter_states),
    )


def _compare_files(first_path: Path, second_path: Path) -> FileComparison:
    with open_tensors(first_path) as first, open_tensors(second_path) as second:
        kinds = _kinds(first), _kinds(second)
        only = (
            [n for n in kinds[0] if n not in kinds[1]],
            [n for n in kinds[1] if n not in kinds[0]],
        )
        common = [name for name in kinds[0] if name in kinds[1]]
        mismatched = {
            name: (kinds[0][name], kinds[1][name])
            for name in common
            if kinds[0][name] != kinds[1][name]
        }
        differences = [
            _compare_tensors(name, first.get_tensor(name), second.get_tensor(name))
            for name in common
            if name not in mismatched
        ]
    changes = sorted((item for item in differences if item), key=_largest_first)
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
    for a, b in _blocks(first, second):
        squared_norm += _squared_norm(a.double())
        if torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            continue
        equal = False
        gap = _gap(a.double(), b.double())
        largest = torch.maximum(largest, gap.abs().max())  # propagates NaN
        squared_distance += _squared_norm(gap)
    if equal:
        return None
    return TensorDifference(name, largest.item(), _relative(squared_distance, squared_norm))


def _blocks(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for low in range(0, first.numel(), _BLOCK):
        rows = slice(low, low + _BLOCK)
        yield first.reshape(-1)[rows], second.reshape(-1)[rows]


def _gap(first: Tensor, second: Tensor) -> Tensor:
    """Return the difference, which is 0 where both are the same infinity or both NaN."""
    same = (first == second) | (first.isnan() & second.isnan())
    return (first - second).masked_fill_(same, 0.0)


def _squared_norm(values: Tensor) -> float:
    return values.square().sum().item()


def _relative(squared_distance: float, squared_norm: float) -> float:
    if squared_distance == 0:
        return 0.0
    if squared_norm == 0:
        return math.inf * squared_distance  # NaN if the distance is
    return math.sqrt(squared_distance / squared_norm)


def _largest_first(change: TensorDifference) -> tuple[bool, float]:
    return not math.isnan(change.largest), -change.largest


def _options(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a configuration by their flags, as typed on the command line."""
    options: dict[str, str] = {}
    for section, value in config.items():
        fields = value if isinstance(value, Mapping) else {"": value}
        options |= {
            flag_of(f"{section}.{key}".rstrip(".")): " ".join(words_of(item))
            for key, item in fields.items()
        }
    return options


def _compare_values(
    first: Mapping[str, ParameterState], second: Mapping[str, ParameterState]
) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return the differing optimizer values that are not tensors of a parameter's shape."""
    first_values, second_values = (
        {(key, name): value for name, state in s.items() for key, value in state.others.items()}
        for s in (first, second)
    )
    differences: dict[str, dict[str, tuple[Any, Any]]] = {}
    absent = {"value": _ABSENT}
    for key, name in first_values | second_values:
        pair = first_values.get((key, name), absent), second_values.get((key, name), absent)
        if repr(pair[0]) != repr(pair[1]):  # by repr, because NaN differs from itself
            differences.setdefault(key, {})[name] = (pair[0]["value"], pair[1]["value"])
    return differences
