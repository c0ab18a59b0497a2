"""Curves of a run's metrics, read from its metrics.jsonl."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mntrain.metrics.files import METRICS_FILE, flatten, read_metrics

Array = np.ndarray[Any, np.dtype[np.float64]]

# Columns whose product is the extent of a step on an axis.
_EXTENTS = {"hours": ["step_s"], "samples": ["samples"], "tokens": ["tokens_per_s", "step_s"]}
_SMOOTHED = 40  # the running mean spans a 40th of a curve
_MAX_POINTS = 4000  # of a drawn curve


@dataclass(frozen=True)
class Curve:
    """One metric of one run; a value is NaN where it was not finite."""

    x: Array
    y: Array

    def smoothed(self) -> "Curve | None":
        """Return the exponential running mean, None if the curve is short.

        Without the bias to the first value, as in TensorBoard.
        """
        span = len(self.y) / _SMOOTHED
        if span <= 1:
            return None
        keep = 1 - 2 / (span + 1)
        total = weight = 0.0
        means = []
        for value in self.y:
            if np.isfinite(value):
                total = keep * total + (1 - keep) * value
                weight = keep * weight + (1 - keep)
            means.append(total / weight if np.isfinite(value) else np.nan)
        return Curve(self.x, np.array(means))

    def thinned(self) -> "Curve":
        """Return the least and the largest value of equal parts of a curve of many points."""
        parts = _MAX_POINTS // 2
        if len(self.y) <= _MAX_POINTS:
            return self
        kept = []
        for part in np.array_split(np.arange(len(self.y)), parts):
            values = self.y[part]
            if np.isnan(values).all():
                kept += [part[0]]
            else:
                kept += sorted({part[np.nanargmin(values)], part[np.nanargmax(values)]})
        return Curve(self.x[kept], self.y[kept])


@dataclass(frozen=True)
class LoggedRun:
    """The lines of one run's metrics.jsonl, flattened, and the run's label."""

    label: str
    path: Path
    lines: list[dict[str, Any]]

    @property
    def names(self) -> list[str]:
        """The metrics that can be drawn."""
        numbers = {n: None for line in self.lines for n, v in line.items() if _is_number(v)}
        return [name for name in numbers if name != "step"]

    def curve(self, name: str, axis: str) -> Curve | None:
        """Return a metric over an axis, None if no line has a finite value of it."""
        positions = self._positions(axis)
        points = [
            (x, line[name] if _is_number(line[name]) else np.nan)
            for x, line in zip(positions, self.lines, strict=True)
            if name in line
        ]
        values = np.array(points, dtype=np.float64).reshape(-1, 2)
        return Curve(values[:, 0], values[:, 1]) if np.isfinite(values[:, 1]).any() else None

    def _positions(self, axis: str) -> Iterable[float]:
        """Return the place of each line on an axis, at the end of its step."""
        if axis == "step":
            return [line["step"] for line in self.lines]
        columns = _EXTENTS[axis]
        for column in columns:
            if not any(column in line for line in self.lines):
                raise ValueError(f"--x {axis}: {self.path} has no {column}; give --x step")
        amounts = (math.prod(line.get(name) or 0 for name in columns) for line in self.lines)
        scale = 3600 if axis == "hours" else 1
        return [float(amount) / scale for amount in accumulate(amounts)]


def read_run(path: Path) -> list[dict[str, Any]]:
    """Return the flattened lines of a run's steps. Raises ValueError if there are none."""
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder; give the folder of a run")
    if not (path / METRICS_FILE).exists():
        raise ValueError(f"{path} has no {METRICS_FILE}: give the folder of a run")
    lines = [flatten(line) for line in read_metrics(path) if _is_number(line.get("step"))]
    if not lines:
        raise ValueError(f"{path}: its {METRICS_FILE} has no step yet")
    return lines


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
