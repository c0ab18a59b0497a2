"""The files of a run's reports: metrics.jsonl, a line for each step, and summary.json."""

import errno
import json
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

CONFIG_FILE, METRICS_FILE, SUMMARY_FILE = "config.toml", "metrics.jsonl", "summary.json"
REPORT_FILE = "report.html"
PAGE_LIMIT_S = 120.0  # that a page may take at the end of a job, while all its ranks wait

Line = Mapping[str, Any]  # of metrics.jsonl


def append_whole(path: Path, content: bytes) -> None:
    """Append to a file that no other process writes; it gets all of the content or nothing.

    Makes the file if there is none. Raises OSError for nothing. A part of a number would look like
    another number.
    """
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def end_last_line(path: Path) -> None:
    """End a line that a kill has cut short, in a file of lines; make it if there is none.

    Raises OSError.
    """
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        cut = end and file.read(1) != b"\n"
    if cut:
        append_whole(path, b"\n")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, without one that a kill has cut short.

    Nor with one that has no step, of another program. Empty if the run has none. Raises OSError if
    it cannot be read.
    """
    lines = []
    try:
        text = (run_dir / METRICS_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return [x for x in lines if isinstance(x, dict) and isinstance(x.get("step"), int | float)]


def flatten(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl without nested objects: metrics/accuracy, eval_metrics/top5.

    These are the names of columns, tags and curves.
    """
    flat: dict[str, Any] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": item for inner, item in value.items()}
        else:
            flat[name] = value
    return flat


def flat_options(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the options of nested tables, as those of config.toml, by their names, as text."""
    flat: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_options(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[f"{prefix}{name}"] = text
    return flat


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write a run's summary.json as a whole."""
    write_whole(run_dir / SUMMARY_FILE, (json_text(summary, indent=2) + "\n").encode())


def loss_text(run_dir: Path, missing: Sequence[str]) -> str:
    """Return the sentence for what could not be written to a run's directory."""
    return f"{run_dir} lacks {', '.join(missing)}: these could not be written"


def write_whole(path: Path, content: bytes | Iterable[bytes], mode: int = 0o666) -> None:
    """Write a file that appears, or replaces an older one, as a whole and synced to disk.

    `mode` is that of the file, less what the umask takes.
    """
    # A name that nobody can foresee, and has put a link to another file in the place of.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def json_text(value: Any, indent: int | None = None) -> str:
    """Return the JSON of plain objects and paths, with null for floats that are not finite."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), allow_nan=False, default=str, indent=indent)


def write_page(run_dir: Path) -> str:
    """Let `report` write the page of a run, and return why it did not; empty if it did. Local.

    In a process of its own, which is ended after `PAGE_LIMIT_S`.
    """
    words = ["-m", "mntrain", "report", str(run_dir)]
    again = f"python {' '.join(words)} writes it"
    try:
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            check=False,
            errors="replace",
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=PAGE_LIMIT_S,
        )
    except OSError as error:
        return f"{error}; {again}"
    except subprocess.TimeoutExpired:
        return f"it took more than {PAGE_LIMIT_S:g} s; {again}"
    lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("mntrain: ") if done.returncode else ""
