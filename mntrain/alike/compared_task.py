"""Comparison of a task over ranks: its source files, values, files and samples."""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch.utils.data import Dataset

from mntrain.alike.compared_loaders import compare_samples
from mntrain.alike.compared_options import SAME_OPTIONS_AND_FILES
from mntrain.alike.naming import first_names
from mntrain.alike.sample_digest import digest_of, hexadecimal, of_samples, spread_digest
from mntrain.alike.values import Peers, compare
from mntrain.errors import agreement

_SHOWN = 3  # of what has changed
_FILES = 100  # of data, whose sizes are compared
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = {"mntrain", "zero"}  # compared as a whole


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
        compare_samples(ranks, of_samples(dataset, indices), data, SAME_OPTIONS_AND_FILES)
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


def describe_sources(kind: type) -> dict[str, str]:
    """Return a digest of each source file of a class and its bases, to compare over ranks. Local.

    See `module_files`. Nothing of Python's library, mntrain and zero, which have versions.
    """
    files: dict[str, Path] = {}
    for name in dict.fromkeys(base.__module__ for base in kind.__mro__):
        if _is_compared(name):
            files |= module_files(sys.modules[name])
    return {
        f"the source {name}": f"digest {hexadecimal(path.read_bytes())}"
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
