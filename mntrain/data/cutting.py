"""Cutting of a batch into the rows of each rank.

A batch is a nest of fields with columns as leaves. A column has one entry a sample:

    tensor, array            a column, cut along its first dimension; passed through if it has none
    mapping, dataclass,      fields, each cut by itself
      tuple, named tuple
    list                     a column; fields if entries are tensors of unlike kinds
    tuple of strings         a column, as torch's default collate makes them
    None, string, number     passed through

Anything else is refused: it might hold samples. So is a list of tensors or arrays of one dtype and
number of dimensions: it may have one entry a sample, or be fields.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor


def length_of(batch: Any) -> int:
    """Return the number of samples of a batch.

    Raises ValueError if its columns differ in length, and TypeError for what cannot be cut.
    """
    lengths = set()

    def count(column: Any) -> Any:
        if isinstance(column, Tensor) and column.is_nested:
            raise _no_rows("nested")
        lengths.add(len(column))
        return column

    map_columns(batch, count)
    if len(lengths) != 1:
        raise ValueError(
            "a batch to cut needs columns of one length, but those of this "
            f"{type(batch).__name__} have {sorted(lengths) or 'none'}: give one entry a sample "
            "to each tensor, array and list of samples"
        )
    return lengths.pop()


def rows_of_tensors(batch: Any) -> int | None:
    """Return the number of rows of all tensors and arrays of a batch; None if it is not clear."""
    lengths = set()

    def count(column: Any) -> Any:
        if isinstance(column, Tensor | np.ndarray):
            lengths.add(column.size(0) if isinstance(column, Tensor) else len(column))
        return column

    try:
        map_columns(batch, count)
    except TypeError:
        return None
    return lengths.pop() if len(lengths) == 1 else None


def cut(batch: Any, rows: slice) -> Any:
    """Return the rows of a batch: views of its tensors and arrays, and new containers.

    Raises TypeError for a tensor that is sparse.
    """
    return map_columns(batch, partial(_rows_of, rows))


def _rows_of(rows: slice, column: Any) -> Any:
    if isinstance(column, Tensor) and column.layout is not torch.strided:
        raise _no_rows("sparse")
    return column[rows]


def _no_rows(kind: str) -> TypeError:
    return TypeError(
        f"a batch with a {kind} tensor cannot be cut into samples: use dense tensors or lists of "
        "samples, or a DataLoader of torch whose collate_fn makes it, of which each rank loads its "
        "own samples alone"
    )


def join(parts: Sequence[Any]) -> Any:
    """Return one batch of the rows of several, of like structure.

    Lists and tuples of samples become lists; what is not cut comes from the first part.
    """
    return map_columns(parts[0], _join_columns, *parts[1:])


def _join_columns(*columns: Any) -> Any:
    if isinstance(columns[0], Tensor):
        return torch.cat(columns)
    if isinstance(columns[0], np.ndarray):
        return np.concatenate(columns)
    return [entry for column in columns for entry in column]


def map_columns(nest: Any, change: Callable[..., Any], *others: Any) -> Any:
    """Return a nested batch with all columns changed.

    `change` gets those of `others`, nests of like structure, too.
    """
    if isinstance(nest, Tensor | np.ndarray):
        return change(nest, *others) if nest.ndim else nest
    if nest is None or isinstance(nest, str | bytes | Number | np.generic):
        return nest
    if isinstance(nest, Mapping):
        changed = copy.copy(nest) if isinstance(nest, MutableMapping) else {}
        for key, value in nest.items():
            changed[key] = map_columns(value, change, *(other[key] for other in others))
        return changed
    if isinstance(nest, tuple | list):
        if _is_column(nest):
            return change(nest, *others)
        fields = zip(nest, *others, strict=True)
        items = [map_columns(value, change, *rest) for value, *rest in fields]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        made = {}
        for name in [field.name for field in dataclasses.fields(nest) if field.init]:
            value, *rest = (getattr(one, name) for one in (nest, *others))
            made[name] = map_columns(value, change, *rest)
        return dataclasses.replace(nest, **made)
    raise TypeError(
        f"a batch with a {type(nest).__name__} cannot be cut into samples: use tensors, arrays "
        "and lists of samples, in tuples, mappings or dataclasses"
    )


def _is_column(sequence: Sequence[Any]) -> bool:
    """Return whether the entries of a list or tuple are those of the samples, and not fields."""
    if sequence and all(isinstance(entry, str | bytes) for entry in sequence):
        return not hasattr(sequence, "_fields")
    if sequence and type(sequence) is tuple and all(isinstance(e, Number) for e in sequence):
        raise TypeError(
            f"a tuple of {len(sequence)} numbers may be of the samples or of the whole batch: make "
            "it a list or tensor with one number a sample, or a mapping"
        )
    if isinstance(sequence, tuple):
        return False
    tensors = [e for e in sequence if isinstance(e, Tensor | np.ndarray) and e.ndim]
    if len(tensors) == len(sequence) and len({(type(t), t.dtype, t.ndim) for t in tensors}) == 1:
        raise TypeError(
            f"a list of {len(sequence)} tensors may be {len(sequence)} samples, or columns with "
            "one row a sample: make it one tensor, or a tuple of columns"
        )
    return not tensors
