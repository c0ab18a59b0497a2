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
from torch.utils.data import Dataset, IterableDataset

from mntrain.data.randomness import SeededDraws

_ELEMENTS = 1024  # read of a floating-point tensor
_TOLERANCE = 1e-3  # of floating-point elements: processors and libraries round differently
_DIGITS = 12
_SPREAD = 8  # samples of a dataset that a resumed run compares
_PLAIN = (str, bytes, bytearray, PurePath, Number, type(None))


@dataclass(frozen=True, eq=False)
class SampleDigest:  # noqa: PLW1641 - equality with a tolerance has no hash
    """A digest of a sample without its floating-point elements, and some of these elements.

    Two are equal if the elements agree to 0.1 % of the largest.
    """

    digest: str
    elements: tuple[float, ...] = ()

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
    `failure` is the first exception of a sample that could not be read.
    """

    sizes: Mapping[str, object]
    indices: int | None = None
    content: Content = field(default_factory=dict)
    again: Callable[[], Content] | None = None
    may_be_random: bool = False
    failure: str = ""


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

    failures: list[str] = []

    def read() -> Content:
        return fields_of([_read(copied, index, failures) for index in indices])

    content, failure = read(), next(iter(failures), "")
    return FirstBatch(sizes or {}, digest, content, read, may_be_random=True, failure=failure)


def spread_digest(data: Any) -> dict[str, str]:
    """Return a digest of evenly spaced samples of a dataset or a list, by field. Local.

    Without fields that change when they are read again. Empty for data without an index, such as
    streams.
    """
    last = -1
    if hasattr(data, "__getitem__") and not isinstance(data, IterableDataset):
        with suppress(TypeError, NotImplementedError):
            last = len(data) - 1
    if last < 0:
        return {}
    indices = sorted({last * place // (_SPREAD - 1) for place in range(_SPREAD)})
    samples = of_samples(data, indices)
    if samples.again is None:
        return {}
    again = samples.again()
    return {
        name: digest_of(*map(repr, values))
        for name, values in samples.content.items()
        if repr(values) == repr(again.get(name))
    }


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


def ends(samples: Sequence[Any]) -> list[Any]:
    """Return the first and the last of some samples."""
    return [*samples[:1], *samples[1:][-1:]]


def can_be_read_again(dataset: Any) -> bool:
    """Return True unless a dataset holds an iterator, such as a file, which would go on."""
    held = list(vars(dataset).values()) if hasattr(dataset, "__dict__") else []
    return not hasattr(dataset, "__next__") and not any(
        hasattr(value, "__next__") or (isinstance(value, Dataset) and not can_be_read_again(value))
        for value in held
    )


def _read(dataset: Any, index: Any, failures: list[str]) -> Any:
    """Return a sample, or the type of the exception that it raises, which `failures` then has."""
    try:
        with SeededDraws(0):
            return dataset[index]
    except Exception as error:
        kind, text = type(error).__name__, str(error).partition("\n")[0]
        failures.append(f"{kind}: {text} (sample {index})")
        return kind


def detached(dataset: Any) -> Any:
    """Return a shallow copy of a dataset, of those that it wraps, and of their generators."""
    made = copy.copy(dataset)
    held = getattr(made, "__dict__", {})
    for name, value in list(held.items()):
        if isinstance(value, Dataset):
            held[name] = detached(value)
        elif isinstance(value, list | tuple) and any(isinstance(v, Dataset) for v in value):
            held[name] = [detached(v) for v in value]
        elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            held[name] = copy.deepcopy(value)
        elif isinstance(value, torch.Generator):
            held[name] = value.clone_state()
        elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType | FunctionType):
            with suppress(Exception):  # some objects cannot be copied, such as locks
                held[name] = copy.copy(value)  # a reader that opens its file later
    return made


def digest_of(*parts: str) -> str:
    """Return a digest of texts, each with its length, as hexadecimal digits."""
    return hexadecimal(repr(parts).encode())


def hexadecimal(data: bytes) -> str:
    """Return twelve hexadecimal digits of a digest."""
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def fields_of(samples: Sequence[Any]) -> dict[str, list[SampleDigest]]:
    """Return the digests of samples by the name of a field, such as "[0]" in a tuple.

    Mappings, dataclasses, tuples and lists have fields, but for a list of numbers or texts, which
    is one.
    """
    found: dict[str, list[SampleDigest]] = {}
    for sample in samples:
        for name, value in _fields(sample, ""):
            found.setdefault(name, []).append(digest_field(value))
    return found


def _fields(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _fields(value[key], f"{name}[{key!r}]")
    elif isinstance(value, tuple) or (
        isinstance(value, list) and not all(isinstance(entry, _PLAIN) for entry in value)
    ):
        for index, entry in enumerate(value):
            yield from _fields(entry, f"{name}[{index}]")
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        yield from _fields(vars(value), name)
    else:
        yield name, value


def digest_field(value: Any) -> SampleDigest:
    """Return the digest of a tensor, an array, a number, a text, or a list or set of such.

    Of a path and of text with slashes, only the last part counts, since data may lie elsewhere on
    another node; of any other object, only its type.
    """
    kind = type(value).__qualname__
    numbers = isinstance(value, list) and value and all(isinstance(v, Number) for v in value)
    if isinstance(value, np.ndarray | np.generic | float) or numbers:
        array = np.array(value)
        value = torch.from_numpy(array) if array.dtype.kind in "biufc" else array.tolist()
    if not isinstance(value, Tensor):
        return SampleDigest(f"{kind} {hexadecimal(_text_of(value).encode())}")
    kind += f" {value.dtype} {tuple(value.shape)}"
    if value.layout != torch.strided or value.is_quantized or not value.numel():
        return SampleDigest(kind)
    flat = value.detach().reshape(-1)
    if flat.is_floating_point():
        elements = flat[:: math.ceil(len(flat) / _ELEMENTS)].cpu().double()
        return SampleDigest(kind, tuple(elements.tolist()))
    content = flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return SampleDigest(f"{kind} {hexadecimal(content)}")


def _text_of(value: Any) -> str:
    if isinstance(value, str | PurePath):
        return repr(str(value).rstrip("/").rpartition("/")[2])
    if isinstance(value, list | Set):
        texts = map(_text_of, value)
        return f"[{', '.join(sorted(texts) if isinstance(value, Set) else texts)}]"
    return repr(value) if isinstance(value, _PLAIN) else ""
