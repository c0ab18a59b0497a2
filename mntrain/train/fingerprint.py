"""The fingerprint of a run's data, which checkpoints keep and resumed jobs compare."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from mntrain.data.sample_digest import SampleDigest
from mntrain.equal_values import Given

_MAX_FILES = 100  # whose digests are kept; of more, evenly spaced ones
_MAX_ELEMENTS = 16  # of a sample's floating-point elements


def fingerprint(files: Mapping[str, Given], samples: Mapping[str, Given]) -> dict[str, Any]:
    """Return what `describe_files` and `describe_samples` have returned, as a JSON object."""
    names = list(files)
    kept = names[:: -(-len(names) // _MAX_FILES) or 1]
    return {
        "files": {name: str(files[name].value) for name in kept},
        "samples": {name: _plain(given.value) for name, given in samples.items()},
    }


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], find_random: Callable[[], set[str]]
) -> list[str]:
    """Return the names of the files and samples that differ from an earlier fingerprint. Local.

    `find_random` returns the names of samples that are random, which do not count. Checkpoints of
    earlier versions have no fingerprint, which differs in nothing.
    """
    changed = [
        name
        for name, value in cast(Mapping[str, str], now["files"]).items()
        if before.get("files", {}).get(name, value) != value
    ]
    earlier = before.get("samples", {})
    other = [
        name
        for name, value in cast(Mapping[str, Any], now["samples"]).items()
        if name in earlier and _comparable(value) != _comparable(earlier[name])
    ]
    random = find_random() if other else set()
    return changed + [name for name in other if name not in random]


def _plain(value: object) -> Any:
    """Return a sample's digest as plain objects; for one that cannot be drawn, the error's type."""
    if isinstance(value, SampleDigest):
        return [value.digest, *value.elements[:_MAX_ELEMENTS]]
    return str(value)


def _comparable(value: Any) -> object:
    return SampleDigest(value[0], tuple(value[1:])) if isinstance(value, list) else value
