"""Comparison over ranks, before any work: of options, a task's sources and data, and loaders."""

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, TypeVar, cast

from torch.utils.data import Dataset

from mntrain.checks.finding import naming
from mntrain.cli import RefusedOptionsError, named_options
from mntrain.config import MAY_DIFFER, RANK_OPTIONS, Config, flag_of
from mntrain.config_types import words_of
from mntrain.data.sample_digest import (
    Content,
    FirstBatch,
    digest_of,
    of_samples,
    spread_digest,
)
from mntrain.data.source import Peers
from mntrain.equal_values import compare, expect_same, same_digests
from mntrain.errors import AgreedError, agreement
from mntrain.ranks import Ranks, start_mpi
from mntrain.tasks import Task
from mntrain.watchdog.start_timer import TIMEOUT_S, limited_start

T = TypeVar("T")

_FIX = "give all ranks the same options, and all nodes the same files"
_FIX_LOADERS = (
    "give world.shard the same loader over all samples on every rank, of which it hands out the "
    "rank's part, or divided=True if each rank's loader gives that part alone"
)
_READS = 8  # of samples that differ: a coin that is flipped once may not show
_SHOWN = 3  # fields
_FILES = 100  # of data, whose sizes are compared
_DIGITS = 12
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = {"mntrain", "zero"}  # compared as a whole


def agree_on_options(parsed: T | RefusedOptionsError) -> T:
    """Return the options of a command, if all ranks have the same. Collective, before any world.

    Raises AgreedError on all ranks if any differs, if a rank refuses its options, if MPI cannot
    start, and if the launcher started more ranks than MPI sees. Versions and sources of packages
    are compared by the checks of the world (`mntrain.checks.all_ranks`).
    """
    with limited_start(parsed.comm.timeout if isinstance(parsed, Config) else TIMEOUT_S):
        comm, _ = start_mpi()
        try:
            with agreement(comm.gather_objects, comm.rank):
                if isinstance(parsed, RefusedOptionsError):
                    raise ValueError(parsed.text)
            compare(comm.gather_objects, describe_options(parsed), comm.rank, _FIX)
        except AgreedError:
            comm.free()
            raise
        comm.free()
        return parsed


def describe_options(options: Any) -> dict[str, str]:
    """Return the text of each option that ranks must share, by its flag. Local."""
    return {
        flag_of(name): " ".join(words_of(value))
        for name, value in named_options(options).items()
        if name not in MAY_DIFFER
    }


def compare_config(world: Ranks, config: Mapping[str, Any] | None) -> None:
    """Compare what an own loop gives as its options, unless a rank gives None. Collective.

    Numbers, text, paths, None and containers of these are compared, and of other objects the class;
    but not an option that `MAY_DIFFER` or `RANK_OPTIONS` names. Raises AgreedError on all ranks.
    """
    if all(world.gather(config is not None)):
        given = _plain_options(config or {})
        fix = "give all ranks the same, and leave out of config what is of one rank only"
        compare(world.gather, given, world.rank, fix)


def _plain_options(config: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return the text of each option that is to be compared, by its dotted name."""
    told: dict[str, object] = {}
    for name, value in config.items():
        dotted = f"{prefix}{name}".lower().replace("-", "_")
        if isinstance(value, Mapping):
            told |= _plain_options(value, f"{prefix}{name}.")
        elif dotted not in MAY_DIFFER and dotted.rpartition(".")[2] not in RANK_OPTIONS:
            told[f"config {prefix}{name}"] = json.dumps(value, skipkeys=True, default=_plain)
    return told


def _plain(value: object) -> object:
    """Return what JSON has in place of a value that it lacks."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value) if isinstance(value, Real | PurePath) else type(value).__qualname__


def compare_task(world: Ranks, task: Task, datasets: Mapping[str, Dataset[Any]]) -> dict[str, Any]:
    """Compare the task's source files and values, and its data by sizes and samples. Collective.

    `datasets` have a length and are named. Of each, the first, the middle and the last sample also
    show data that the task has divided between ranks, which may be of equal sizes. Returns the
    sizes of files, the values, and on rank 0 digests of samples, as a JSON object for checkpoints.
    Raises AgreedError on all ranks for a difference.
    """
    counts = {name: len(cast(Any, dataset)) for name, dataset in datasets.items()}
    with world.agreement():
        values = dict(task.compared_values())
        files = describe_files(task.compared_files())
        sources = describe_sources(type(task))
    # Some ranks may have imported more, such as what draws.
    common = set(sources).intersection(*world.gather([*sources]))
    told = {
        **{name: sources[name] for name in sorted(common)},
        **values,
        **{f"the number of {name} samples": count for name, count in counts.items()},
        **files,
    }
    compare(world.gather, told, world.rank, _FIX)
    for name, dataset in datasets.items():
        count = counts[name]
        indices = sorted({0, count // 2, count - 1} if count else set())
        _compare_samples(world, of_samples(dataset, indices), f"the {name} data", _FIX)
    samples = {
        f"the {name} data": spread_digest(dataset) if world.master else {}
        for name, dataset in datasets.items()
    }
    return {"files": files, "values": values, "samples": samples}


def changed_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what has changed in the data since a checkpoint, in words. Local.

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
    return changed


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


def describe_sources(kind: type) -> dict[str, str]:
    """Return a digest of each source file of a class and its bases, to compare over ranks. Local.

    See `module_files`. Nothing of Python's library, mntrain and zero, which have versions.
    """
    files: dict[str, Path] = {}
    for name in dict.fromkeys(base.__module__ for base in kind.__mro__):
        if _is_compared(name):
            files |= module_files(sys.modules[name])
    return {
        f"the source {name}": f"digest {hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]}"
        for name, path in files.items()
    }


def _is_compared(module: str) -> bool:
    return module.partition(".")[0] not in _OURS | sys.stdlib_module_names


def module_files(module: ModuleType) -> dict[str, Path]:
    """Return the files of a module, and of all modules of its folder that are imported by now.

    By their name relative to the folder on sys.path, such as "my_package/my_task.py". Of an
    installed module, only its package counts.
    """
    names, file = module.__name__.split("."), Path(getattr(module, "__file__", None) or "")
    if not file.is_file():  # typed in, or in an archive
        return {}
    root = file.parents[len(names) - (file.name != "__init__.py")]
    package = names[0] if root.name in _INSTALLED else None
    found = {file.relative_to(root).as_posix(): file}
    for name, other in [*sys.modules.items()]:
        path = Path(getattr(other, "__dict__", {}).get("__file__") or "")
        if path.suffix != ".py" or not path.is_relative_to(root) or not _is_compared(name):
            continue
        inside = path.relative_to(root)
        if not path.is_file():  # in an archive, or removed since
            continue
        if package == name.partition(".")[0] or not (package or _INSTALLED & {*inside.parts}):
            found[inside.as_posix()] = path
    return found


def compare_loaders(ranks: Peers, first: FirstBatch) -> None:
    """Raise AgreedError on all ranks unless their loaders have equal sizes and samples. Collective.

    Samples as in `_compare_samples`.
    """
    gathered = _expect_divided(ranks, False, (first.sizes, first.indices))
    expect_same([sizes for sizes, _ in gathered], ranks.rank, _FIX_LOADERS)
    if len({indices for _, indices in gathered}) > 1:
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
    length = None
    with suppress(TypeError, NotImplementedError):
        length = len(loader)  # type: ignore[arg-type]
    lengths = _expect_divided(ranks, True, length)
    return None if None in lengths else max(lengths)


def _expect_divided(ranks: Peers, divided: bool, value: Any) -> list[Any]:
    """Gather values. Raises AgreedError on all ranks unless these give the same `divided`."""
    gathered = ranks.gather((divided, value))
    given = [{"divided of world.shard": each} for each, _ in gathered]
    expect_same(given, ranks.rank, "give the same on all ranks")
    return [each for _, each in gathered]


def _compare_samples(ranks: Peers, first: FirstBatch, of: str, fix: str) -> None:
    """Raise AgreedError on all ranks unless their samples are equal. Collective.

    A digest travels first. If samples differ, they are read again on every rank: the fields that
    any rank then finds changed are random, and are not compared. If all are, the samples are equal
    where their indices are, and else the error says so.
    """
    if same_digests(ranks.gather, first.content):
        return
    gathered: Sequence[tuple[Content, set[str]]]
    gathered = ranks.gather((dict(first.content), _changing(first)))
    content, changing = [own for own, _ in gathered], set[str]().union(*(c for _, c in gathered))

    def differing(own: Content) -> set[str]:
        """Return the fields of which a rank has another value than rank 0."""
        return {n for n in {*own, *content[0]} if own.get(n) != content[0].get(n)}

    all_differing = set[str]().union(*map(differing, content))
    if fixed := all_differing - changing:
        fields = [f" in {name}" for name in sorted(fixed) if name]
        where = naming("rank", [r for r, own in enumerate(content) if differing(own) & fixed])
        raise AgreedError(
            f"the samples of {of} on {where} differ from those on rank 0"
            f"{','.join(fields[:_SHOWN])}: {fix}",
            ranks.rank,
        )
    if all_differing and not first.may_be_random and set(first.content) <= changing:
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
    return {
        name
        for name in set[str]().union(*reads)
        if any(other.get(name) != reads[0].get(name) for other in reads)
    }
