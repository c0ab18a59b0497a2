"""Cutting of a batch into the rows of each rank.

A batch is a nest of fields with columns as leaves. A column has one entry a sample:

    tensor, array            a column, cut along its first dimension; passed through if it has none
    mapping, dataclass,      fields, each cut by itself
      tuple, named tuple
    list                     see `Lists`
    tuple of strings         a column, as torch's default collate makes them
    None, string, number     passed through

Anything else is refused: it might hold samples.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from numbers import Number
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from zero.layout import split

Lists: TypeAlias = Literal["samples", "columns"] | None
"""Meaning of the lists of a batch when it is cut.

"samples": a list has one entry a sample. "columns": its entries are fields, as those of a tuple.
None: samples if no entry is a tensor or array with dimensions; columns if some are, of unlike kinds
(dtype or number of dimensions). A list of like tensors may be either, so it is refused.
"""

Rows: TypeAlias = slice


def share_of(
    samples: int, rank: int, size: int, bounds: Sequence[int] | None = None
) -> tuple[Rows, int]:
    """Return a rank's rows of a batch, or the stand-in's, and the rank's number of samples.

    `bounds` are those of the ranks' parts; None makes these equal to within one.
    """
    if samples == 0:
        raise ValueError("the loader made a batch of no samples: leave it out")
    start, stop = (bounds or split(samples, size))[rank : rank + 2]
    return (slice(start, stop), stop - start) if start < stop else (slice(0, 1), 0)


def length_of(batch: Any, lists: Lists = None) -> int:
    """Return the number of samples of a batch.

    Raises ValueError if its columns differ in length, and TypeError for what cannot be cut.
    """
    lengths = set()

    def count(column: Any) -> Any:
        lengths.add(len(column))
        return column

    map_columns(batch, count, lists)
    if len(lengths) != 1:
        raise ValueError(
            "a batch to cut needs columns of one length, but those of this "
            f"{type(batch).__name__} have {sorted(lengths) or 'none'}: give one entry a sample "
            "to each tensor, array and list of samples"
        )
    return lengths.pop()


def cut(batch: Any, rows: Rows, lists: Lists = None) -> Any:
    """Return the rows of a batch: views of its tensors and arrays, and new containers."""
    return map_columns(batch, itemgetter(rows), lists)


def join(parts: Sequence[Any]) -> Any:
    """Return one batch of the rows of several, of like structure.

    Lists and tuples of samples become lists; what is not cut comes from the first part.
    """
    first = parts[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(list(parts))
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(parts)
    if isinstance(first, Mapping):
        joined = copy.copy(first) if isinstance(first, MutableMapping) else {}
        joined.update({key: join([part[key] for part in parts]) for key in first})
        return joined
    if isinstance(first, tuple | list):
        if _is_column(first, None):
            return [entry for part in parts for entry in part]
        fields = [join(column) for column in zip(*parts, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        first = dataclasses.replace(
            first, **{name: join([getattr(part, name) for part in parts]) for name in names}
        )
    return first


def map_columns(nest: Any, change: Callable[[Any], Any], lists: Lists) -> Any:
    """Return a nested batch with all columns changed."""
    if isinstance(nest, Tensor | np.ndarray):
        return change(nest) if nest.ndim else nest
    if nest is None or isinstance(nest, str | bytes | Number | np.generic):
        return nest
    if isinstance(nest, Mapping):
        changed = copy.copy(nest) if isinstance(nest, MutableMapping) else {}
        changed.update({key: map_columns(value, change, lists) for key, value in nest.items()})
        return changed
    if isinstance(nest, tuple | list):
        if _is_column(nest, lists):
            return change(nest)
        items = [map_columns(value, change, lists) for value in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = [field.name for field in dataclasses.fields(nest) if field.init]
        return dataclasses.replace(
            nest, **{name: map_columns(getattr(nest, name), change, lists) for name in names}
        )
    raise TypeError(
        f"a batch with a {type(nest).__name__} cannot be cut into samples: use tensors, arrays "
        "and lists of samples, in tuples, mappings or dataclasses"
    )


def _is_column(sequence: Sequence[Any], lists: Lists) -> bool:
    """Return whether the entries of a list or tuple are those of the samples, and not fields."""
    if sequence and all(isinstance(entry, str | bytes) for entry in sequence):
        return not hasattr(sequence, "_fields")
    if type(sequence) is tuple and all(isinstance(entry, Number) for entry in sequence):
        raise TypeError(
            f"a tuple of {len(sequence)} numbers may be of the samples or of the whole batch: make "
            "it a list or tensor with one number a sample, or a mapping"
        )
    if isinstance(sequence, tuple) or lists == "columns":
        return False
    tensors = [e for e in sequence if isinstance(e, Tensor | np.ndarray) and e.ndim]
    if lists == "samples" or not tensors:
        return True
    if len(tensors) == len(sequence) and len({(type(t), t.dtype, t.ndim) for t in tensors}) == 1:
        raise TypeError(
            f"a list of {len(sequence)} tensors may be {len(sequence)} samples, or columns with "
            "one row a sample: pass lists='samples' or lists='columns' to shard(), or make it a "
            "tuple of columns"
        )
    return False
