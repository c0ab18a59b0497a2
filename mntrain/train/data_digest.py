"""Digests of data: of sampled blocks of files, and of some samples of a dataset."""

import copy
import hashlib
import math
import random
import socket
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from numbers import Number
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mntrain.data.randomness import SeededDraws
from mntrain.equal_values import Given

_BLOCK = 4096  # bytes
_BLOCKS = 1024  # read of all files together; but at least 3 and at most 64 of one
_ELEMENTS = 1024  # read of a floating-point tensor
_TOLERANCE = 1e-3  # of floating-point elements: processors and libraries round differently
_DIGITS = 12
_REDRAWS = 8  # of samples that differ between ranks: a coin that is flipped once may not show


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

    def __str__(self) -> str:
        return f"digest {_digest(self.digest, *map(repr, self.elements))}"


def describe_files(files: Mapping[str, Path]) -> dict[str, Given]:
    """Return a digest of the names of files, and of each its size and a digest of its content.

    Local. Reads about 4 MiB; of more than 1,024 files, evenly spaced ones. Raises OSError.
    """
    if not files:
        return {}
    names = Given(f"{len(files)} files, digest {_digest(*files)}")
    told = {"the list of the data's files": names}
    blocks = min(max(_BLOCKS // len(files), 3), 64)
    host = socket.gethostname()
    for name in list(files)[:: math.ceil(len(files) / _BLOCKS)]:
        path = files[name]
        content = f"{path.stat().st_size} bytes, digest {_digest(*_blocks_of(path, blocks))}"
        told[f"the content of {name}"] = Given(content, f"{path} on {host}")
    return told


def describe_samples(name: str, dataset: Dataset[Any]) -> dict[str, Given]:
    """Return digests of the first, the middle and the last sample of a map-style dataset. Local.

    The samples are drawn from a copy of the dataset, so that files that it opens at the first
    access stay closed, under fixed states of the default generators, which are then restored. A
    sample that cannot be drawn counts as the type of its exception.
    """
    try:
        copied = detached(dataset)
    except Exception:
        return {}
    return {text: _drawn(copied, index) for text, index in _chosen(name, dataset).items()}


def random_samples(name: str, dataset: Dataset[Any]) -> set[str]:
    """Return the names of those samples that are not the same when they are drawn again. Local.

    They are drawn repeatedly from one copy of the dataset, under other states of the default
    generators.
    """
    try:
        copied = detached(dataset)
    except Exception:
        return set()
    found = set()
    for text, index in _chosen(name, dataset).items():
        draws = [_drawn(copied, index, seed) for seed in range(_REDRAWS)]
        if any(draw != draws[0] for draw in draws):
            found.add(text)
    return found


def _chosen(name: str, dataset: Dataset[Any]) -> dict[str, int]:
    """Return the indices of the samples that are drawn, by their names in errors."""
    count = len(cast(Any, dataset))
    indices = sorted({0, count // 2, count - 1} if count else set())
    return {f"sample {index} of the {name} data": index for index in indices}


def _drawn(dataset: Dataset[Any], index: int, seed: int = 0) -> Given:
    """Return the digest of a sample, or the exception."""
    try:
        with SeededDraws(seed):
            return Given(digest_sample(dataset[index]))
    except Exception as error:
        return Given(type(error).__name__, f"{error} on {socket.gethostname()}")


def digest_sample(sample: Any) -> SampleDigest:
    """Return the digest of tensors, arrays, numbers, text, and containers of these.

    Of a path and of text with slashes, only the last part counts, since data may lie elsewhere on
    another node; of any other object, only its type.
    """
    elements: list[float] = []
    return SampleDigest(_digest(*_parts_of(sample, elements)), tuple(elements))


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
        yield from sorted(str(digest_sample(item)) for item in value)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _parts_of(vars(value), elements)


def _parts_of_tensor(tensor: Tensor, elements: list[float]) -> Iterator[bytes | str]:
    yield f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return
    flat = tensor.detach().cpu().reshape(-1)
    if flat.is_floating_point():
        elements += flat[:: math.ceil(len(flat) / _ELEMENTS)].double().tolist()
    else:
        yield flat.contiguous().view(torch.uint8).numpy().tobytes()


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


def _blocks_of(path: Path, count: int) -> Iterator[bytes]:
    """Yield a file's content, or so many evenly spaced blocks of a large file."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        if size <= count * _BLOCK:
            yield file.read()
            return
        for index in range(count):
            file.seek((size - _BLOCK) * index // (count - 1))
            yield file.read(_BLOCK)


def _digest(*parts: bytes | str) -> str:
    """Return a digest of parts, each with its length, as hexadecimal digits."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:_DIGITS]
