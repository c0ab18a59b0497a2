"""The files of a run's directory, as far as they are there."""

import json
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from mntrain.alike.naming import naming
from mntrain.checkpoint.reader import inspected
from mntrain.metrics.files import (
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    flat_options,
    flatten,
    read_metrics,
)
from mntrain.recorder.autopsy import describe, examine, find_recordings
from mntrain.recorder.recording import Kind, Recording
from mntrain.report.charts import Curve

_GOOD_ENDS = ("completed", "stopped", "preempted", "interrupted")
_ERRORS = (Kind.ERROR, Kind.SHARED_ERROR, Kind.CRASH)


class RunFiles:
    """A run of a job or of a user's own loop; what it lacks is empty.

    `missing` says what it lacks, in sentences, and `end` has the lines of `autopsy`, unless the
    newest job ended well. Raises ValueError for a folder that is none of a run.
    """

    def __init__(self, path: Path, label: str) -> None:
        names = (METRICS_FILE, SUMMARY_FILE, CONFIG_FILE)
        if not any((path / name).exists() for name in names):
            raise ValueError(f"{path} has no {', '.join(names)}: give the folder of a run")
        self.label, self.path = label, path
        self.missing = missing = list[str]()
        lines = [flatten(line) for line in read_metrics(path)]
        self.lines = lines  # of metrics.jsonl
        if not lines:
            missing.append("No step is in metrics.jsonl.")
        self.summary: dict[str, Any] = {}
        try:
            self.summary = dict(json.loads((path / SUMMARY_FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            missing.append("There is no summary.json: the job still runs, or it was killed.")
        except (ValueError, TypeError) as error:
            missing.append(f"summary.json is damaged: {error}.")
        self.options: dict[str, str] = {}  # of config.toml, by name: train.steps
        try:
            options = tomllib.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
            self.options = flat_options(options)
        except FileNotFoundError:
            missing.append("There is no config.toml: the loop gave no configuration.")
        except ValueError as error:
            missing.append(f"config.toml is damaged: {error}.")
        self.recordings: Sequence[Recording] = []  # of the newest job
        try:
            self.recordings, notes = find_recordings(path)
        except ValueError:
            notes = ["There are no recordings of ranks."]
        bad = [line["step"] for line in lines if "loss" in line and line["loss"] is None]
        if bad:
            missing.append(f"The loss is not finite in {len(bad)} steps, first in step {bad[0]}.")
        if lost := self.summary.get("not_written"):
            missing.append(f"Could not be written: {', '.join(lost)}.")
        self.end: Sequence[str] = []
        if self.recordings and self.summary.get("status") not in _GOOD_ENDS:
            self.end = describe(examine(path, self.recordings))
        missing += notes

    @property
    def names(self) -> list[str]:
        """The metrics that can be drawn."""
        numbers = {n: None for line in self.lines for n, v in line.items() if _is_number(v)}
        return [name for name in numbers if name != "step"]

    def curve(self, name: str) -> Curve | None:
        """Return a metric over the steps, None if no line has a finite value of it."""
        known = [(line["step"], line[name]) for line in self.lines if name in line]
        steps = np.array([step for step, _ in known], dtype=np.float64)
        values = np.array([v if _is_number(v) else np.nan for _, v in known], dtype=np.float64)
        return (steps, values) if np.isfinite(values).any() else None

    @property
    def status(self) -> str:
        """The status in summary.json, with the reason or the error if there is one."""
        facts = [self.summary.get(key) for key in ("status", "reason", "error")]
        return ": ".join(dict.fromkeys(str(fact) for fact in facts if fact)) or "no result"

    def checkpoints(self) -> Iterator[dict[str, Any]]:
        """Yield what is known of each checkpoint, the newest first."""
        for path, content in inspected(self.path):
            if isinstance(content, str):
                yield {"checkpoint": path.name, "saved by": f"unsound: {content}"}
                continue
            yield {
                "checkpoint": path.name,
                "saved by": content.writers,
                "date": content.date[:19].replace("T", " "),
                "bytes": content.nbytes,
                "eval_loss": content.eval_loss,
            }

    def events(self) -> Iterator[tuple[str, str]]:
        """Yield when something happened to the run, and what."""
        if resumed := self.summary.get("resumed_from"):
            yield "start", f"resumed from {resumed}"
        for line in self.lines:
            if line.get("skipped"):
                yield f"step {line['step']}", "skipped: the gradient was not finite"
            if "error" in line:
                yield f"step {line['step']}", str(line["error"])
        what: dict[str, dict[int, float]] = {}
        for end in self.recordings:
            for event in end.events:
                if event.kind in _ERRORS:
                    text = f"{event.text}{f', at {event.site}' if event.site else ''}"
                elif event.kind == Kind.SIGNAL:
                    text = f"got {event.text}"
                else:
                    continue
                at = end.header.wall + event.time
                what.setdefault(text, {}).setdefault(end.header.rank, at)
        for text, times in sorted(what.items(), key=lambda item: min(item[1].values())):
            date = datetime.fromtimestamp(min(times.values()), UTC)
            yield f"{date:%Y-%m-%d %H:%M:%S} UTC", f"{naming('rank', list(times))}: {text}"


def read_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """Return all that is known of runs. Raises ValueError for a folder that is none of a run."""
    names = [path.resolve().name for path in paths]
    labels = names if len(set(names)) == len(names) else list(map(str, paths))
    return list(map(RunFiles, paths, labels))


def panel_of(runs: Sequence[RunFiles], name: str) -> dict[str, list[Curve | None]]:
    """Return the curves of a name in metrics.jsonl and of its evaluations, without empty ones."""
    curves = {name: [run.curve(name) for run in runs] for name in (name, f"eval_{name}")}
    return {name: by_run for name, by_run in curves.items() if any(by_run)}


def differing(runs: Sequence[RunFiles]) -> list[dict[str, str | None]]:
    """Return the options of each run that are not the same in all of them, but for its folder."""
    names = dict.fromkeys(n for run in runs for n in run.options if n != "run.dir")
    differ = [name for name in names if len({run.options.get(name) for run in runs}) > 1]
    return [{name: run.options.get(name) for name in differ} for run in runs]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
