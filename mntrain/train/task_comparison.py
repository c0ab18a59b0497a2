"""Comparison of a task's source and data over ranks, before any work."""

from collections.abc import Mapping
from typing import Any, cast

from torch.utils.data import Dataset

from mntrain.equal_values import Given, compare, expect_same, same_digests
from mntrain.run.comparison import FIX
from mntrain.run.source_files import describe_sources
from mntrain.tasks import Task
from mntrain.train.data_digest import describe_files, describe_samples, random_samples
from mntrain.world import World


def compare_task(world: World, task: Task, datasets: Mapping[str, Dataset[Any]]) -> dict[str, Any]:
    """Compare the task's source files and values, and its data by sizes and samples. Collective.

    Samples also show data that the task has divided between ranks, which may be of equal sizes.
    `datasets` have a length and are named. Returns the sizes of files and the values, as a JSON
    object for checkpoints. Raises AgreedError on all ranks for a difference. If samples differ
    between ranks, they are drawn again: those that a rank then finds changed are random, and are
    not compared.
    """
    with world.agreement():
        values = dict(task.compared_values())
        files = describe_files(task.compared_files())
        told = {
            **describe_sources(type(task)),
            **values,
            **{f"the number of {n} samples": len(cast(Any, d)) for n, d in datasets.items()},
            **files,
        }
    compare(world.gather, told, world.rank, FIX)
    samples = _draw(datasets)
    if not same_digests(world.gather, samples):
        random = set[str]().union(*world.gather(_find_random(datasets)))
        stable = {name: value for name, value in samples.items() if name not in random}
        expect_same(world.gather(stable), world.rank, FIX)
    return {"files": {name: str(given.value) for name, given in files.items()}, "values": values}


def _find_random(datasets: Mapping[str, Dataset[Any]]) -> set[str]:
    """Return the names of compared samples that are not the same when drawn again. Local."""
    changing = [random_samples(name, dataset) for name, dataset in datasets.items()]
    return set[str]().union(*changing)


def _draw(datasets: Mapping[str, Dataset[Any]]) -> dict[str, Given]:
    return {
        text: given
        for name, dataset in datasets.items()
        for text, given in describe_samples(name, dataset).items()
    }
