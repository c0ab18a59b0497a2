"""The properties of data that ranks compare: sizes of files, and digests of some samples."""

import math
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch.utils.data import Dataset

from mntrain.data.randomness import SeededDraws
from mntrain.data.sample_digest import detached, digest_of, digest_sample
from mntrain.equal_values import Given

_FILES = 100  # whose sizes are compared
_REDRAWS = 8  # of samples that differ between ranks: a coin that is flipped once may not show


def describe_files(files: Mapping[str, Path]) -> dict[str, Given]:
    """Return a digest of the names of files, and the size of each. Local.

    Of more than 100 files, the sizes of evenly spaced ones. Raises OSError.
    """
    if not files:
        return {}
    told = {
        "the list of the data's files": Given(f"{len(files)} files, digest {digest_of(*files)}")
    }
    host = socket.gethostname()
    for name in list(files)[:: math.ceil(len(files) / _FILES)]:
        size = f"{files[name].stat().st_size} bytes"
        told[f"the size of {name}"] = Given(size, f"{files[name]} on {host}")
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
