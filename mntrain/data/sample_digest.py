"""Digests of samples, and the first batch of a loader, by which ranks notice that data differ."""

import copy
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Number
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mntrain.data.randomness import SeededDraws

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
        most = np.abs(ours[np.isfinite(ours)]).max(initial=0.0)
        return np.allclose(ours, theirs, rtol=0, atol=_TOLERANCE * most, equal_nan=True)


Content: TypeAlias = Mapping[str, list[SampleDigest]]
"""Digests of some samples, by the name of the field (`fields_of`)."""


@dataclass(frozen=True)
class FirstBatch:
    """The properties of a loader and its first batch, or of some samples, equal on all ranks.

    `indices` is a digest of the samples' indices, if they have any. `again` reads the samples of
    `content` once more, in the same states of the default generators: what changes is random. None
    if that is impossible. Samples `may_be_random` altogether where their order cannot differ.
    """

    sizes: Mapping[str, object]
    indices: int | None = None
    content: Content = field(default_factory=dict)
    again: Callable[[], Content] | None = None
    may_be_random: bool = False


def of_samples(
    dataset: Dataset[Any],
    indices: Sequence[Any],
    sizes: Mapping[str, object] | None = None,
    digest: int | None = None,
) -> FirstBatch:
    """Describe some samples of a map-style dataset, with a `digest` of a batch's indices. Local.

    They are read from a copy of the dataset, so that files which it opens at the first access stay
    closed. One that cannot be read counts as the type of its exception, and a dataset that cannot
    be copied as one without samples.
    """
    try:
        copied = detached(dataset)
    except Exception:
        return FirstBatch(sizes or {}, digest)

    def read() -> Content:
        return fields_of([_read(copied, index) for index in indices])

    return FirstBatch(sizes or {}, digest, read(), read, may_be_random=True)


def of_batch(loader: Any, batch: Any, samples: int, again: Callable[[], Any]) -> FirstBatch:
    """Describe a batch of any loader; `again` makes the first one another time. Local."""

    def read() -> Content:
        return fields_of([again()])

    once = hasattr(loader, "__next__")  # an iterator goes on
    return FirstBatch(sizes_of(loader, samples), None, fields_of([batch]), None if once else read)


def sizes_of(loader: Any, samples: int) -> dict[str, object]:
    """Return the lengths of a loader and its dataset, if they have one, and of its first batch."""
    sizes: dict[str, object] = {}
    for name, owner in (
        ("the number of the dataset's samples", getattr(loader, "dataset", None)),
        ("the number of the loader's batches", loader),
    ):
        with suppress(TypeError, NotImplementedError):
            sizes[name] = len(owner)  # type: ignore[arg-type]
    return {**sizes, "the number of samples in a batch": samples}


def ends(samples: list[Any]) -> list[Any]:
    """Return the first and the last of some samples."""
    return [*samples[:1], *samples[1:][-1:]]


def can_be_read_again(dataset: Any) -> bool:
    """Return True unless a dataset holds an iterator, such as a file, which would go on."""
    held = list(vars(dataset).values()) if hasattr(dataset, "__dict__") else []
    return not hasattr(dataset, "__next__") and not any(
        hasattr(value, "__next__") or (isinstance(value, Dataset) and not can_be_read_again(value))
        for value in held
    )


def _read(dataset: Any, index: Any) -> Any:
    try:
        with SeededDraws(0):
            return dataset[index]
    except Exception as error:
        return type(error).__name__


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
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.array(value))
    if isinstance(value, Tensor):
        yield from _parts_of_tensor(value, elements)
    elif isinstance(value, float):
        elements.append(value)
    elif isinstance(value, str | PurePath):
        yield str(value).rstrip("/").rpartition("/")[2]
    elif isinstance(value, bytes | bytearray):
        yield bytes(value)
    elif isinstance(value, Number | None):
        yield repr(value)
    elif isinstance(value, Set):
        yield from sorted(repr(digest_sample(item)) for item in value)
    elif isinstance(value, Mapping | list | tuple):
        if isinstance(value, Mapping):
            value = sorted(value.items(), key=lambda pair: str(pair[0]))
        for item in value:
            yield from _parts_of(item, elements)
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
