"""Cache of tuning results in a file of the user, for 30 days.

The cache is a convenience: a file that cannot be read, written or understood counts as empty.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from mntrain.comm.algorithm_table import AlgorithmChoice, AlgorithmTable

MAX_AGE = timedelta(days=30)
MAX_ENTRIES = 100
MAX_BYTES = 1 << 40  # of a tensor; a larger size is nonsense


@dataclass(frozen=True)
class Tuning:
    """The algorithm table that `auto` stands for, with a one-line explanation."""

    table: AlgorithmTable
    line: str


@dataclass(frozen=True)
class CacheEntry:
    """A cached tuning and the time at which it was measured."""

    tuning: Tuning
    measured: datetime

    def fresh(self, now: datetime) -> bool:
        """Return True unless the entry is older than 30 days or lies in the future."""
        return timedelta(0) <= now - self.measured <= MAX_AGE


def key_of(facts: Mapping[str, Any]) -> str:
    """Return a short key that depends on every fact, given as JSON values."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def cache_path() -> Path | None:
    """Return the cache file, in $XDG_CACHE_HOME or ~/.cache; None where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "mntrain" / "tuning.json"


def find(key: str) -> CacheEntry | None:
    """Return the fresh entry of a key, if there is one. Local."""
    entry = _read().get(key)
    return entry if entry and entry.fresh(datetime.now(UTC)) else None


def store(key: str, tuning: Tuning) -> None:
    """Add or replace an entry and drop stale ones. Local.

    The file is replaced atomically. If two jobs write at once, one entry may be lost. Failures to
    write are ignored.
    """
    path, now = cache_path(), datetime.now(UTC)
    entries = {name: entry for name, entry in _read().items() if entry.fresh(now)}
    entries[key] = CacheEntry(tuning, now)
    latest = sorted(entries, key=lambda name: entries[name].measured)[-MAX_ENTRIES:]
    if path is not None:
        with contextlib.suppress(OSError):
            _write(path, {name: _to_json(entries[name]) for name in latest})


def _read() -> dict[str, CacheEntry]:
    """Return all valid entries of the file."""
    path = cache_path()
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}
    entries = {}
    for name, value in content.items() if isinstance(content, dict) else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entries[name] = _from_json(value)
    return entries


def _to_json(entry: CacheEntry) -> dict[str, Any]:
    steps = [[max_bytes, choice.algorithm] for max_bytes, choice in entry.tuning.table.steps]
    return {"measured": entry.measured.isoformat(), "steps": steps, "line": entry.tuning.line}


def _from_json(value: Any) -> CacheEntry:
    """Parse an entry. Raises ValueError, TypeError or KeyError for an invalid one."""
    measured = datetime.fromisoformat(value["measured"])
    steps = [(max_bytes, AlgorithmChoice(name)) for max_bytes, name in value["steps"]]
    sizes, line = [max_bytes for max_bytes, _ in steps], value["line"]
    if (
        measured.tzinfo is None
        or not sizes
        or any(type(size) is not int or not 0 <= size <= MAX_BYTES for size in sizes)
        or sizes != sorted(set(sizes))
        or type(line) is not str
        or not line.isprintable()
    ):
        raise ValueError(f"invalid entry: {value}")
    return CacheEntry(Tuning(AlgorithmTable(tuple(steps)), line), measured)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
