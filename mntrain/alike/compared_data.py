"""Comparison of data over ranks: of a task with its sources and files, and of loaders."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from torch.utils.data import Dataset

from mntrain.alike.compared_options import SAME_OPTIONS_AND_FILES
from mntrain.alike.naming import first_names, naming
from mntrain.alike.sample_digest import Content, FirstBatch, digest_of, of_samples, spread_digest
from mntrain.alike.source_files import describe_sources
from mntrain.alike.values import Peers, compare, same_texts
from mntrain.errors import AgreedError, agreement

_FIX_LOADERS = (
    "give world.shard the same loader over all samples on every rank, of which it hands out the "
    "rank's part, or divided=True if each rank's loader gives that part alone"
)
_READS = 8  # of samples that differ: a coin that is flipped once may not show
_SHOWN = 3  # fields, and what has changed
_FILES = 100  # of data, whose sizes are compared


def compare_task(
    ranks: Peers,
    kind: type,
    values_of: Callable[[], Mapping[str, str]],
    files_of: Callable[[], Mapping[str, Path]],
    datasets: Mapping[str, Dataset[Any]],
) -> dict[str, Any]:
    """Compare a task's source files and values, and its data by sizes and samples. Collective.

    `kind` is the task's class, and `values_of` and `files_of` are its `compared_values` and
    `compared_files`. `datasets` have a length and are named. Of each, the first, the middle and the
    last sample also show data that the task has divided between ranks, which may be of equal sizes.
    Returns the sizes of files, the values, and on rank 0 digests of samples, as a JSON object for
    checkpoints. Raises AgreedError on all ranks for a difference.
    """
    counts = {name: len(cast(Any, dataset)) for name, dataset in datasets.items()}
    with agreement(ranks.gather, ranks.rank):
        values = dict(values_of())
        files = describe_files(files_of())
        sources = describe_sources(kind)
    # Some ranks may have imported more, such as what draws.
    common = set(sources).intersection(*ranks.gather([*sources]))
    told = {
        **{name: sources[name] for name in sorted(common)},
        **values,
        **{f"the number of {name} samples": count for name, count in counts.items()},
        **files,
    }
    compare(ranks, told, SAME_OPTIONS_AND_FILES)
    samples: dict[str, dict[str, str]] = {}
    for name, dataset in datasets.items():
        count, data = counts[name], f"the {name} data"
        indices = sorted({0, count // 2, count - 1} if count else set())
        _compare_samples(ranks, of_samples(dataset, indices), data, SAME_OPTIONS_AND_FILES)
        samples[data] = spread_digest(dataset) if ranks.rank == 0 else {}
    return {"files": files, "values": values, "samples": samples}


def describe_files(files: Mapping[str, Path]) -> dict[str, str]:
    """Return a digest of the names of files, and the size of each. Local.

    Of more than 100 files, the sizes of evenly spaced ones. Raises OSError.
    """
    if not files:
        return {}
    some = list(files)[:: math.ceil(len(files) / _FILES)]
    return {
        "the list of the data's files": f"{len(files)} files, digest {digest_of(*files)}",
        **{f"the size of {name}": f"{files[name].stat().st_size} bytes" for name in some},
    }


def changed_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a sentence about what has changed in the data since a checkpoint, or "". Local.

    `before` and `now` are of `compare_task`, or hold the digests of samples alone. What either of
    them lacks is not compared, as in a checkpoint of an earlier version.
    """
    known, samples = before.get("files", {}), before.get("samples", {})
    changed = [n for n, value in now.get("files", {}).items() if known.get(n, value) != value]
    for name, fields in now["samples"].items():
        other = samples.get(name) or fields
        common = fields.keys() & other.keys()
        if any(fields[n] != other[n] for n in common) or (fields and not common):
            changed.append(f"samples of {name}")
    names = first_names(changed, _SHOWN)
    return f"the data is not that of the checkpoint: {names} changed" if changed else ""


def compare_loaders(ranks: Peers, first: FirstBatch) -> None:
    """Raise AgreedError on all ranks unless their loaders have equal sizes and samples. Collective.

    Samples as in `_compare_samples`.
    """
    _expect_divided(ranks, False)
    compare(ranks, first.sizes, _FIX_LOADERS)
    if not same_texts(ranks, {"indices": first.indices}):
        raise AgreedError(
            "the ranks drew different samples for one global batch: seed the sampler alike on all "
            "ranks, or give world.shard divided=True if each rank's loader gives its own part",
            ranks.rank,
        )
    _compare_samples(ranks, first, "the first batch", _FIX_LOADERS)


def length_of_divided(ranks: Peers, loader: Iterable[Any]) -> int | None:
    """Return the number of batches of the longest of the ranks' own loaders. Collective.

    None if one has no length. Raises AgreedError on all ranks if others have not given divided.
    """
    _expect_divided(ranks, True)
    length = None
    with suppress(TypeError, NotImplementedError):
        length = len(loader)  # type: ignore[arg-type]
    lengths = ranks.gather(length)
    return None if None in lengths else max(lengths)


def _expect_divided(ranks: Peers, divided: bool) -> None:
    compare(ranks, {"divided of world.shard": divided}, "give the same on all ranks")


def _compare_samples(ranks: Peers, first: FirstBatch, of: str, fix: str) -> None:
    """Raise AgreedError on all ranks unless their samples are equal. Collective.

    A digest travels first. If samples differ, they are read again on every rank: the fields that
    any rank then finds changed are random, and are not compared. If all are, the samples are equal
    where their indices are, and else the error says so.
    """
    if same_texts(ranks, first.content):
        return
    gathered: list[tuple[Content, set[str]]]
    gathered = ranks.gather((dict(first.content), _changing(first)))
    changing = set[str]().union(*(names for _, names in gathered))
    odd: dict[str, list[int]] = {}  # by field, the ranks that have another value than rank 0
    for name in dict.fromkeys(name for own, _ in gathered for name in own):
        values = [own.get(name) for own, _ in gathered]
        if others := [rank for rank, value in enumerate(values) if value != values[0]]:
            odd[name] = others
    if fixed := sorted(odd.keys() - changing):
        where = naming("rank", sorted(set[int]().union(*(odd[name] for name in fixed))))
        fields = [f" in {name}" for name in fixed if name]
        raise AgreedError(
            f"the samples of {of} on {where} differ from those on rank 0"
            f"{','.join(fields[:_SHOWN])}: {fix}",
            ranks.rank,
        )
    if odd and not first.may_be_random and set(first.content) <= changing:
        raise AgreedError(
            f"the samples of {of} differ between ranks, and also if a rank reads them "
            "again, so their order may differ: draw from the default generators of torch, Python "
            "or NumPy, which world.shard seeds alike on all ranks, or give divided=True if each "
            "rank's loader gives its own part",
            ranks.rank,
        )


def _changing(first: FirstBatch) -> set[str]:
    """Return the fields of samples that change when they are read again. Local."""
    if first.again is None:
        return set()
    reads = [first.again() for _ in range(_READS)]
    names = set[str]().union(*reads)
    return {name for name in names if any(r.get(name) != reads[0].get(name) for r in reads)}
