"""What was found out before, in files of the user's: for a month, by what it depends on.

The files are a convenience: where one cannot be read, or holds nonsense, there is none.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LIFE = timedelta(days=30)
MOST_ENTRIES = 100


@dataclass(frozen=True)
class CacheEntry(Generic[T]):
    """What was found, and when."""

    content: T
    measured: datetime

    def fresh(self, now: datetime) -> bool:
        """Whether this still holds; not if it is old, nor if it comes from the future."""
        return timedelta(0) <= now - self.measured <= LIFE


def key_of(facts: Mapping[str, Any]) -> str:
    """A short name for all that a finding depends on, given as JSON takes it."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TuningCache(Generic[T]):
    """Findings of one kind, in one file. All calls are local.

    `read` makes one of a JSON object, and raises ValueError, TypeError or KeyError for nonsense;
    `write` makes a JSON object of one.
    """

    name: str  # of the file
    read: Callable[[Mapping[str, Any]], T]
    write: Callable[[T], dict[str, Any]]

    def place(self) -> Path | None:
        """The file: in $XDG_CACHE_HOME, or in ~/.cache; None where there is no home."""
        base = os.environ.get("XDG_CACHE_HOME", "")
        try:
            home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
        except RuntimeError:
            return None
        return home / "mntrain" / self.name

    def find(self, key: str) -> CacheEntry[T] | None:
        """The entry of a key, if there is a fresh one."""
        entry = self._read().get(key)
        return entry if entry and entry.fresh(datetime.now(UTC)) else None

    def keep(self, key: str, content: T) -> None:
        """Add an entry, or replace it; old ones go. Readers find the old file or the new one.

        Where it cannot be written it is left. Of two jobs that write at once, one may win.
        """
        path, now = self.place(), datetime.now(UTC)
        fresh = {name: entry for name, entry in self._read().items() if entry.fresh(now)}
        fresh[key] = CacheEntry(content, now)
        latest = sorted(fresh, key=lambda name: fresh[name].measured)[-MOST_ENTRIES:]
        if path is not None:
            with contextlib.suppress(OSError):
                _write(path, {name: self._to_json(fresh[name]) for name in latest})

    def _read(self) -> dict[str, CacheEntry[T]]:
        """All entries that make sense."""
        path = self.place()
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path else {}
        except (OSError, ValueError, RecursionError):
            return {}
        entries = {}
        for name, value in found.items() if isinstance(found, dict) else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                entries[name] = self._from_json(value)
        return entries

    def _to_json(self, entry: CacheEntry[T]) -> dict[str, Any]:
        return {"measured": entry.measured.isoformat(), **self.write(entry.content)}

    def _from_json(self, value: Any) -> CacheEntry[T]:
        measured = datetime.fromisoformat(value["measured"])
        if measured.tzinfo is None:
            raise ValueError(f"no time: {value}")
        return CacheEntry(self.read(value), measured)


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
