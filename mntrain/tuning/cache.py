"""What was measured before, in a file of the user's: the table of every world, for a month.

The file is a convenience: where it cannot be read, or holds nonsense, there is none.
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

from mntrain.collectives.choice import ALGORITHMS, Choice, Table

LIFE = timedelta(days=30)
MOST_ENTRIES = 100
_MOST_BYTES = 1 << 40  # of a size or a piece; more is nonsense


@dataclass(frozen=True)
class Entry:
    """What was found, and when."""

    table: Table
    line: str
    measured: datetime

    def fresh(self, now: datetime) -> bool:
        """Whether this still holds; not if it is old, nor if it comes from the future."""
        return timedelta(0) <= now - self.measured <= LIFE


def place() -> Path | None:
    """The file: in $XDG_CACHE_HOME, or in ~/.cache; None where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return home / "mntrain" / "tuning.json"


def key_of(facts: Mapping[str, Any]) -> str:
    """A short name for all that a measurement depends on, given as JSON takes it."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def find(key: str) -> Entry | None:
    """The entry of a world, if there is a fresh one. Local."""
    entry = _read(place()).get(key)
    return entry if entry and entry.fresh(datetime.now(UTC)) else None


def keep(key: str, table: Table, line: str) -> None:
    """Add an entry, or replace it; old ones go. Readers find the old file or the new one. Local.

    Where it cannot be written it is left. Of two jobs that write at once, one may win.
    """
    path, now = place(), datetime.now(UTC)
    fresh = {name: entry for name, entry in _read(path).items() if entry.fresh(now)}
    fresh[key] = Entry(table, line, now)
    latest = sorted(fresh, key=lambda name: fresh[name].measured)[-MOST_ENTRIES:]
    if path is not None:
        with contextlib.suppress(OSError):
            _write(path, {name: _to_json(fresh[name]) for name in latest})


def _read(path: Path | None) -> dict[str, Entry]:
    """All entries that make sense."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}
    entries = {}
    for name, value in found.items() if isinstance(found, dict) else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entries[name] = _from_json(value)
    return entries


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuning.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _to_json(entry: Entry) -> dict[str, Any]:
    steps = [[most, choice.algorithm, choice.piece_bytes] for most, choice in entry.table.steps]
    return {"measured": entry.measured.isoformat(), "steps": steps, "line": entry.line}


def _from_json(value: Any) -> Entry:
    """Raises ValueError, TypeError or KeyError for what is no entry."""
    steps = [(_bytes(most, 0), _choice(name, piece)) for most, name, piece in value["steps"]]
    sizes = [most for most, _ in steps]
    line, measured = value["line"], datetime.fromisoformat(value["measured"])
    sound = type(line) is str and line.isprintable() and measured.tzinfo is not None
    if not sound or not sizes or sizes != sorted(set(sizes)):
        raise ValueError(f"no entry: {value}")
    return Entry(Table(tuple(steps)), line, measured)


def _choice(algorithm: Any, piece_bytes: Any) -> Choice:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no algorithm: {algorithm}")
    return Choice(algorithm, _bytes(piece_bytes, 1))


def _bytes(number: Any, least: int) -> int:
    if type(number) is not int or not least <= number <= _MOST_BYTES:
        raise ValueError(f"no number of bytes: {number}")
    return number
