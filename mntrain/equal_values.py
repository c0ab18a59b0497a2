"""Comparison of values that all ranks must give alike, with an error that names the ranks."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from numbers import Real
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from mntrain.checks.finding import naming
from mntrain.errors import AgreedError

_PLAIN = str | Real | torch.dtype  # attributes of an option that ranks share
_SHOWN = 5  # names, and values of a name, that the error about a difference lists


def compare(
    gather: Callable[[Any], Sequence[Any]], values: Mapping[str, object], rank: int, fix: str = ""
) -> None:
    """Raise AgreedError on all ranks unless they give equal values under each name. Collective.

    A digest travels first, and the values only if digests differ. Message as in `expect_same`.
    """
    if not same_digests(gather, values):
        expect_same(gather(values), rank, fix)


def same_digests(gather: Callable[[Any], Sequence[Any]], values: Mapping[str, object]) -> bool:
    """Return True if the texts (`repr`) of the values are the same on all ranks. Collective."""
    digest = hashlib.sha256(repr(sorted(values.items(), key=itemgetter(0))).encode()).digest()
    return len(set(gather(digest))) == 1


def expect_same(values: Sequence[Mapping[str, Any]], rank: int, fix: str = "") -> None:
    """Raise AgreedError, as `rank`, unless all ranks gave equal values under each name.

    `values` are gathered, by rank. The message has each value of the names that differ with its
    ranks, of lists the first items that differ, and then the `fix`.
    """
    names = dict.fromkeys(name for given in values for name in given)
    texts = [_difference(name, [given.get(name, "nothing") for given in values]) for name in names]
    differences = [text for text in texts if text]
    if hidden := differences[_SHOWN:]:
        differences[_SHOWN:] = [f"{len(hidden)} more differ"]
    if differences:
        raise AgreedError("; ".join(differences) + (f": {fix}" if fix else ""), rank)


def _difference(name: str, values: Sequence[Any]) -> str:
    """Return which ranks have which value, by rank; empty if all values are equal."""
    ranks_by_value: list[tuple[Any, list[int]]] = []
    for rank, value in enumerate(values):
        equal = next((ranks for known, ranks in ranks_by_value if known == value), None)
        if equal is None:
            ranks_by_value.append((value, [rank]))
        else:
            equal.append(rank)
    if len(ranks_by_value) == 1:
        return ""
    if all(isinstance(value, list) for value in values):
        items = zip_longest(*values, fillvalue="no more")
        return _difference(name, next(row for row in items if any(row[0] != i for i in row)))
    shown = [
        f"{naming('rank', ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
        for value, ranks in ranks_by_value
    ]
    if hidden := shown[_SHOWN:]:
        shown[_SHOWN:] = [f"others have {len(hidden)} more values"]
    return f"{name} differs between ranks: {', '.join(shown)}"


def describe(model: nn.Module, options: Mapping[str, object]) -> dict[str, object]:
    """Return all properties of a model and of options that ranks must share, for `expect_same`."""
    tensors = [
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        + ("" if tensor.requires_grad else " frozen")
        + ("" if tensor.is_contiguous() else f" of strides {tensor.stride()}")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    return {**{name: _describe_option(v) for name, v in options.items()}, "the model": tensors}


def _describe_option(option: object) -> object:
    """Return text, numbers and None as they are, and others by class and what all ranks share."""
    if option is None or isinstance(option, str | Real):
        return option
    attributes = getattr(option, "__dict__", {}).items()
    plain = [(n, v) for n, v in attributes if isinstance(v, _PLAIN) and n[0] != "_"]
    return f"{type(option).__qualname__}({', '.join(f'{n}={v!r}' for n, v in plain)})"
