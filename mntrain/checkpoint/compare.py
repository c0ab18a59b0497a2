"""What differs between two checkpoints, tensor by tensor, one block of each in memory at a time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mntrain.checkpoint.format import TensorEntry
from mntrain.checkpoint.manifest import MODEL, OPTIMIZER, FileContents, Manifest
from mntrain.checkpoint.verified_file import VerifiedFile
from mntrain.config import flag_of, words_of

_BLOCK = 1 << 20  # elements; a few copies of them are made in fp64
_ABSENT = "absent"


@dataclass(frozen=True)
class TensorChange:
    """How far a tensor is from the other checkpoint's. NaN where only one of them has a NaN."""

    name: str
    largest: float  # absolute difference of any element
    relative: float  # the difference's L2 norm, of that of the first checkpoint's tensor


@dataclass(frozen=True)
class FileComparison:
    """What differs between the tensors of two files."""

    only: tuple[list[str], list[str]]  # names that the first alone has, and the second alone
    unlike: dict[str, tuple[TensorEntry, TensorEntry]]  # of another shape or dtype
    equal: int  # so many are equal bit for bit
    changes: list[TensorChange]  # the others, the largest first

    @property
    def same(self) -> bool:
        """Whether both have the same tensors, all equal bit for bit."""
        return not (any(self.only) or self.unlike or self.changes)


@dataclass(frozen=True)
class CheckpointDifference:
    """What differs between two checkpoints. Pairs are of the first one's and the second one's."""

    steps: tuple[int, int]
    options: dict[str, tuple[str, str]]  # by flag, as they are typed
    files: dict[str, FileComparison]
    numbers: dict[str, dict[str, tuple[Any, Any]]]  # the optimizer's: by key, and by parameter

    @property
    def same_state(self) -> bool:
        """Whether the model and the optimizer's state are the same, bit for bit."""
        return not self.numbers and all(found.same for found in self.files.values())


def compare(paths: tuple[Path, Path], contents: tuple[Manifest, Manifest]) -> CheckpointDifference:
    """What differs between two checkpoints. ValueError for a file that is damaged."""
    first, second = contents
    return CheckpointDifference(
        (first.step, second.step),
        _different_options(_by_flag(first.config), _by_flag(second.config)),
        {name: _compare_files(name, paths, contents) for name in (MODEL, OPTIMIZER)},
        _different_numbers(first.kept, second.kept),
    )


def _compare_files(
    name: str, paths: tuple[Path, Path], contents: tuple[Manifest, Manifest]
) -> FileComparison:
    with (
        VerifiedFile(paths[0] / name, contents[0].runs[name]) as first,
        VerifiedFile(paths[1] / name, contents[1].runs[name]) as second,
    ):
        ours, theirs = first.layout.entries, second.layout.entries
        only = ([n for n in ours if n not in theirs], [n for n in theirs if n not in ours])
        both = [n for n in ours if n in theirs]
        unlike = {n: (ours[n], theirs[n]) for n in both if _kind(ours[n]) != _kind(theirs[n])}
        found = [_change(n, first, second) for n in both if n not in unlike]
    changes = sorted((one for one in found if one), key=_largest_first)
    return FileComparison(only, unlike, len(found) - len(changes), changes)


def _change(name: str, first: VerifiedFile, second: VerifiedFile) -> TensorChange | None:
    """How far a tensor that both have is from the other; None where it is equal bit for bit."""
    numel = math.prod(first.layout.entries[name].shape)
    equal, largest = True, torch.zeros((), dtype=torch.float64)
    gaps = squares = 0.0
    for low in range(0, numel, _BLOCK):
        high = min(low + _BLOCK, numel)
        ours, theirs = first.read(name, low, high), second.read(name, low, high)
        squares += _squared(ours.double())
        if torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            continue
        equal = False
        gap = _gap(ours.double(), theirs.double())
        largest = torch.maximum(largest, gap.abs().max())  # a NaN stays
        gaps += _squared(gap)
    if equal:
        return None
    return TensorChange(name, largest.item(), _ratio(gaps, squares))


def _gap(ours: Tensor, theirs: Tensor) -> Tensor:
    """The difference; none where both are the same infinity, or both no number."""
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return (ours - theirs).masked_fill_(same, 0.0)


def _squared(values: Tensor) -> float:
    return values.square().sum().item()


def _ratio(gaps: float, squares: float) -> float:
    """That of two norms, given their squares."""
    if gaps == 0:
        return 0.0
    return math.sqrt(gaps / squares) if squares else math.inf * gaps  # of a NaN it is NaN


def _largest_first(change: TensorChange) -> tuple[bool, float]:
    return not math.isnan(change.largest), -change.largest


def _kind(entry: TensorEntry) -> tuple[torch.dtype, tuple[int, ...]]:
    return entry.dtype, entry.shape


def _by_flag(config: Mapping[str, Any]) -> dict[str, str]:
    """Options, as they are typed, out of a configuration by section."""
    found: dict[str, str] = {}
    for name, value in config.items():
        inner = value if isinstance(value, Mapping) else {"": value}
        found |= {
            flag_of(f"{name}.{key}".rstrip(".")): " ".join(words_of(one))
            for key, one in inner.items()
        }
    return found


def _different_options(
    first: Mapping[str, str], second: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    pairs = {
        flag: (first.get(flag, _ABSENT), second.get(flag, _ABSENT)) for flag in {**first, **second}
    }
    return {flag: pair for flag, pair in pairs.items() if pair[0] != pair[1]}


def _different_numbers(
    first: Mapping[str, FileContents], second: Mapping[str, FileContents]
) -> dict[str, dict[str, tuple[Any, Any]]]:
    """What the optimizer keeps of parameters besides tensors of their shape, where it differs."""
    ours, theirs = (
        {(key, name): value for name, one in kept.items() for key, value in one.others.items()}
        for kept in (first, second)
    )
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    absent = {"value": _ABSENT}
    for key, name in ours | theirs:
        pair = ours.get((key, name), absent), theirs.get((key, name), absent)
        if repr(pair[0]) != repr(pair[1]):  # unlike ==, a NaN equals itself there
            found.setdefault(key, {})[name] = (pair[0]["value"], pair[1]["value"])
    return found
