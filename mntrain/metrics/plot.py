"""`python -m mntrain plot`: curves of the metrics of one or several runs, from metrics.jsonl.

One process, without MPI and torch, so that a job can draw its loss at its end in little time.
"""

import argparse
import io
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mntrain.metrics.files import METRICS_FILE, PLOT_FILE, flatten, read_metrics, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# ruff: noqa: PLC0415 - matplotlib is an extra

Array = np.ndarray[Any, np.dtype[np.float64]]
# Steps, and the values of one metric of one run; NaN where one was not finite.
Curve = tuple[Array, Array]

# Seconds that a command may take at the end of a job, while all its ranks wait.
JOB_LIMITS_S = {"plot": 2.0, "report": 30.0}

_SMOOTHED = 40  # the running mean spans a 40th of a curve
_SHORT = 20  # a curve of fewer points shows each of them
_LABEL_LENGTH = 78  # characters in a row of the legend
_POINTS = {"marker": "o", "markersize": 3.5}
_STYLES: dict[str, dict[str, Any]] = {
    "each step": {"linewidth": 0.8, "alpha": 0.4, "zorder": 2},
    "running mean": {"linewidth": 1.6, "zorder": 3},
    "evaluation": {"linewidth": 1.0, "linestyle": "--", "zorder": 4, **_POINTS},
}


def running_mean(values: Array) -> Array | None:
    """Return the exponential running mean, None if there are few values.

    Without the bias to the first value, as in TensorBoard.
    """
    span = len(values) / _SMOOTHED
    if span <= 1:
        return None
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    means = []
    for value in values:
        if np.isfinite(value):
            total = keep * total + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        means.append(total / weight if np.isfinite(value) else np.nan)
    return np.array(means)


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

    def curve(self, name: str) -> Curve | None:
        """Return a metric over the steps, None if no line has a finite value of it."""
        known = [(line["step"], line[name]) for line in self.lines if name in line]
        steps = np.array([step for step, _ in known], dtype=np.float64)
        values = np.array([v if _is_number(v) else np.nan for _, v in known], dtype=np.float64)
        return (steps, values) if np.isfinite(values).any() else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def run(words: Sequence[str]) -> int:
    """Run a command line, and return exit code 0.

    Raises ValueError and OSError for bad input, and SystemExit, with 2 for a malformed command line
    and 0 after --help.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mntrain plot",
        description="Draw metrics of one or several runs from their metrics.jsonl: each step as a "
        "thin line, the running mean as a thick one, and evaluations as points.",
    )
    add = parser.add_argument
    add("runs", metavar="RUN_DIR", type=Path, nargs="+", help="the folder of a run")
    add(
        "--metric",
        metavar="NAME",
        nargs="+",
        default=["loss"],
        help="names in metrics.jsonl, each with its evaluations: grad_norm, or a metric of the "
        "task such as accuracy (default: loss)",
    )
    add(
        "--output",
        metavar="FILE",
        type=Path,
        help="file to write, whose ending is .svg, .png or .pdf (default: the metrics' names "
        f"as in {PLOT_FILE}, in the folder of the run, or in this folder for several runs)",
    )
    add("--log", action="store_true", help="logarithmic vertical axis")
    options = parser.parse_args(words)
    print(_draw(options.runs, options.metric, options.output, log=options.log))
    return 0


def draw_at_end(command: str, run_dir: Path) -> str:
    """Make what `plot` or `report` make of a run, and return why not, empty if it is made. Local.

    In a process of its own, which is ended after the command's `JOB_LIMITS_S`.
    """
    words, limit = ["-m", "mntrain", command, str(run_dir)], JOB_LIMITS_S[command]
    again = f"python {' '.join(words)} draws it"
    try:
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            check=False,
            errors="replace",
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=limit,
        )
    except OSError as error:
        return f"{error}; {again}"
    except subprocess.TimeoutExpired:
        return f"it took more than {limit:g} s; {again}"
    lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("mntrain: ") if done.returncode else ""


def _draw(paths: Sequence[Path], metrics: Sequence[str], output: Path | None, *, log: bool) -> Path:
    if output is None:
        name = "-".join(metrics).replace("/", "-") + Path(PLOT_FILE).suffix
        output = paths[0] / name if len(paths) == 1 else Path(name)
    runs = read_runs(paths)
    panels = [curves_of(runs, metric) for metric in dict.fromkeys(metrics)]
    expect_drawable("plot", output)
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # in the names of runs
        figure = make_figure([run.label for run in runs], panels, log=log)
        figure.savefig(content, format=output.suffix.removeprefix(".").lower(), dpi=160)
    write_whole(output, content.getvalue())
    return output


def expect_drawable(command: str, output: Path) -> None:
    """Raise ValueError if a command cannot draw, or its output has no folder."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"{command} needs matplotlib, which is not installed: pip install jinja2 matplotlib"
        )
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}")


def read_runs(paths: Sequence[Path]) -> list[LoggedRun]:
    """Return runs, labelled by `label_runs`. Raises ValueError for a run that has no steps."""
    runs = []
    for path, label in zip(paths, label_runs(paths), strict=True):
        if not (path / METRICS_FILE).exists():
            raise ValueError(f"{path} has no {METRICS_FILE}: give the folder of a run")
        runs.append(LoggedRun(label, path, read_lines(path)))
        if not runs[-1].lines:
            raise ValueError(f"{path}: its {METRICS_FILE} has no step yet")
    return runs


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the flattened lines of a run that have a step. Raises OSError."""
    return [flatten(line) for line in read_metrics(path) if _is_number(line.get("step"))]


def label_runs(paths: Sequence[Path]) -> list[str]:
    """Return the names of the folders of runs, or their paths if names are not unique."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else list(map(str, paths))


def curves_of(runs: Sequence[LoggedRun], metric: str) -> dict[str, list[Curve | None]]:
    """Return the curves of a metric and of its evaluations by name, each by run.

    Raises ValueError if a run has neither.
    """
    known = {name for run in runs for name in run.names}
    base = metric if {metric, f"eval_{metric}"} & known else f"metrics/{metric}"
    panel = panel_of(runs, base)
    for number, run in enumerate(runs):
        if not any(by_run[number] for by_run in panel.values()):
            raise ValueError(
                f"--metric {metric}: {run.path} has no value of it; it has {', '.join(run.names)}"
            )
    return panel


def panel_of(runs: Sequence[LoggedRun], name: str) -> dict[str, list[Curve | None]]:
    """Return the curves of a name in metrics.jsonl and of its evaluations, without empty ones."""
    curves = {name: [run.curve(name) for run in runs] for name in (name, f"eval_{name}")}
    return {name: by_run for name, by_run in curves.items() if any(by_run)}


def make_figure(
    labels: Sequence[str],
    panels: Sequence[Mapping[str, Sequence[Curve | None]]],
    *,
    log: bool,
) -> "Figure":
    """Return a figure of panels, each of which has the curves of all runs by name.

    Its legend names the runs by their colours, or the kinds of lines of a single run.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    colours = colours_of(len(labels))
    figure = Figure(figsize=(8.0, 4.2 * len(panels)), layout="constrained")
    every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    handles: dict[str, Line2D] = {}
    for axes, panel in zip(every, panels, strict=True):
        handles |= draw_panel(axes, panel, colours)
        axes.set_yscale("log" if log else "linear")
    every[-1].set_xlabel("step")
    every[-1].xaxis.get_major_locator().set_params(integer=True)
    if len(labels) == 1:
        every[0].set_title(_legible(labels[0]), loc="left", fontsize="medium")
    else:
        handles = {
            _legible(label): Line2D([], [], color=colour, linewidth=3)
            for label, colour in zip(labels, colours, strict=True)
        }
    longest = max(len(row) for name in handles for row in name.splitlines())
    columns = max(1, 100 // (longest + 8))
    rows = sum(name.count("\n") + 1 for name in handles) / columns
    figure.set_figheight(figure.get_figheight() + 0.21 * rows)
    options: dict[str, Any] = {"fontsize": "small", "frameon": False}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, **options)
    return figure


def colours_of(runs: int) -> list[Any]:
    """Return a colour for each of several runs; those of a run and of its evaluations for one."""
    import matplotlib as mpl

    if runs == 1:
        return ["C0", "C1"]
    return [mpl.colormaps["turbo"](shade) for shade in np.linspace(0, 1, runs)]


def draw_panel(
    axes: "Axes", panel: Mapping[str, Sequence[Curve | None]], colours: Sequence[Any]
) -> dict[str, "Line2D"]:
    """Draw the curves of all runs, and return a line for each kind. `colours` are `colours_of`."""
    handles = {}
    single = len(next(iter(panel.values()))) == 1
    for name, by_run in panel.items():
        evaluation = name.startswith("eval_")
        for run, curve in enumerate(by_run):
            if curve is None:
                continue
            lines = {"evaluation" if evaluation else "each step": curve}
            if not evaluation and (means := running_mean(curve[1])) is not None:
                lines["running mean"] = curve[0], means
            points = _POINTS if len(curve[0]) < _SHORT else {}
            colour = colours[int(evaluation) if single else run]
            for style, line in lines.items():
                [handles[style]] = axes.plot(*line, color=colour, **{**_STYLES[style], **points})
    axes.set_ylabel(next(iter(panel)))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return handles


def _legible(label: str) -> str:
    """Return a label in rows that fit, in which matplotlib finds no formula and nothing hidden."""
    printable = "".join(c if c.isprintable() else "\ufffd" for c in label)
    visible = f"./{printable}" if printable.startswith("_") else printable
    return textwrap.fill(visible, _LABEL_LENGTH).replace("$", r"\$")
