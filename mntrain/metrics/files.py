"""The files of a run's reports: metrics.jsonl, a line for each step, and summary.json."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

METRICS_FILE, SUMMARY_FILE = "metrics.jsonl", "summary.json"


def open_metrics(run_dir: Path) -> TextIO:
    """Open a run's metrics.jsonl to append lines, each of which reaches the file at once.

    Makes the directory if there is none.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    return (run_dir / METRICS_FILE).open("a", buffering=1, encoding="utf-8")


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write a run's summary.json: readers and crashes find the old file or the new one."""
    path = run_dir / SUMMARY_FILE
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json_text(summary, indent=2) + "\n")
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
