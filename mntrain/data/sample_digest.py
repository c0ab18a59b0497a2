"""Digests of samples, which ranks compare."""

import copy
import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from numbers import Number
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

_ELEMENTS = 1024  # read of a floating-point tensor
_TOLERANCE = 1e-3  # of floating-point elements: processors and libraries round differently
_DIGITS = 12


@dataclass(frozen=True, eq=False)
class SampleDigest:  # noqa: PLW1641 - equality with a tolerance has no hash
    """A digest of a sample without its floating-point elements, and some of these elements.

    Two are equal if the elements agree to 0.1 % of the largest.
    """

    digest: str
    elements: tuple[float, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampleDigest) or self.digest != other.digest:
            return False
        ours, theirs = np.asarray(self.elements), np.asarray(other.elements)
        if ours.shape != theirs.shape:
            return False
        finite = np.abs(ours[np.isfinite(ours)])
        most = float(finite.max()) if len(finite) else 0.0
        return np.allclose(ours, theirs, rtol=0, atol=_TOLERANCE * most, equal_nan=True)


def digest_sample(sample: Any) -> SampleDigest:
    """Return the digest of tensors, arrays, numbers, text, and containers of these.

    Of a path and of text with slashes, only the last part counts, since data may lie elsewhere on
    another node; of any other object, only its type.
    """
    elements: list[float] = []
    return SampleDigest(digest_of(*_parts_of(sample, elements)), tuple(elements))


def fields_of(samples: Sequence[Any]) -> dict[str, list[SampleDigest]]:
    """Return the digests of samples by the name of a field, such as "[0]" in a tuple.

    Mappings, tuples, dataclasses and lists of tensors or of these have fields; all else is one.
    """
    found: dict[str, list[SampleDigest]] = {}
    for sample in samples:
        for name, value in _fields(sample, ""):
            found.setdefault(name, []).append(digest_sample(value))
    return found


def _fields(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _fields(value[key], f"{name}[{key!r}]")
    elif isinstance(value, tuple) or (
        isinstance(value, list)
        and any(isinstance(entry, Tensor | np.ndarray | Mapping | tuple | list) for entry in value)
    ):
        for index, entry in enumerate(value):
            yield from _fields(entry, f"{name}[{index}]")
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for key, entry in vars(value).items():
            yield from _fields(entry, f"{name}.{key}")
    else:
        yield name, value


def _parts_of(value: Any, elements: list[float]) -> Iterator[bytes | str]:
    """Yield what identifies a value, and append sampled floating-point elements."""
    yield type(value).__qualname__
    if isinstance(value, Tensor):
        yield from _parts_of_tensor(value, elements)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        yield from _parts_of_tensor(torch.from_numpy(np.array(value)), elements)
    elif isinstance(value, float):
        elements.append(value)
    elif isinstance(value, str | PurePath):
        yield str(value).rstrip("/").rpartition("/")[2]
    elif isinstance(value, bytes | bytearray):
        yield bytes(value)
    elif isinstance(value, Number | None):
        yield repr(value)
    elif isinstance(value, Mapping):
        for pair in sorted(value.items(), key=lambda pair: str(pair[0])):
            yield from _parts_of(pair, elements)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _parts_of(item, elements)
    elif isinstance(value, Set):
        yield from sorted(repr(digest_sample(item)) for item in value)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _parts_of(vars(value), elements)


def _parts_of_tensor(tensor: Tensor, elements: list[float]) -> Iterator[bytes | str]:
    yield f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point():
        elements += flat[:: math.ceil(len(flat) / _ELEMENTS)].cpu().double().tolist()
    else:
        yield flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def detached(dataset: Any) -> Any:
    """Return a shallow copy of a dataset, of those that it wraps, and of their generators."""
    made = copy.copy(dataset)
    for name, value in list(getattr(made, "__dict__", {}).items()):
        if isinstance(value, Dataset):
            made.__dict__[name] = detached(value)
        elif isinstance(value, list | tuple) and any(isinstance(v, Dataset) for v in value):
            made.__dict__[name] = [detached(v) for v in value]
        elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            made.__dict__[name] = copy.deepcopy(value)
        elif isinstance(value, torch.Generator):
            made.__dict__[name] = torch.Generator(value.device).set_state(value.get_state())
        elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | FunctionType):
            with suppress(Exception):  # some objects cannot be copied, such as locks
                made.__dict__[name] = copy.copy(value)  # a reader that opens its file later
    return made


def digest_of(*parts: bytes | str) -> str:
    """Return a digest of parts, each with its length, as hexadecimal digits."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:_DIGITS]
