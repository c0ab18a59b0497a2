"""Comparison of a task's source and data over ranks, before any work."""

import math
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch.utils.data import Dataset

from mntrain.data.sample_digest import digest_of, of_samples
from mntrain.equal_values import Given, compare
from mntrain.run.comparison import FIX
from mntrain.run.loader_comparison import compare_samples
from mntrain.run.source_files import describe_sources
from mntrain.tasks import Task
from mntrain.world import World

_FILES = 100  # whose sizes are compared


def compare_task(world: World, task: Task, datasets: Mapping[str, Dataset[Any]]) -> dict[str, Any]:
    """Compare the task's source files and values, and its data by sizes and samples. Collective.

    `datasets` have a length and are named. Of each, the first, the middle and the last sample also
    show data that the task has divided between ranks, which may be of equal sizes. Returns the
    sizes of files and the values, as a JSON object for checkpoints. Raises AgreedError on all ranks
    for a difference.
    """
    counts = {name: len(cast(Any, dataset)) for name, dataset in datasets.items()}
    with world.agreement():
        values = dict(task.compared_values())
        files = describe_files(task.compared_files())
        told = {
            **describe_sources(type(task)),
            **values,
            **{f"the number of {name} samples": count for name, count in counts.items()},
            **files,
        }
    compare(world.gather, told, world.rank, FIX)
    for name, dataset in datasets.items():
        count = counts[name]
        indices = sorted({0, count // 2, count - 1} if count else set())
        compare_samples(world, of_samples(dataset, indices), f"the {name} data", FIX)
    return {"files": {name: str(given.value) for name, given in files.items()}, "values": values}


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
