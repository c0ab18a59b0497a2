"""`python -m mntrain plot`: curves of the metrics of one or several runs, from metrics.jsonl.

One process, without MPI and torch, so that a job can draw its loss at its end in little time.
"""

import argparse
import io
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mntrain.metrics.files import METRICS_FILE, PLOT_FILE, flatten, read_metrics, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ruff: noqa: PLC0415 - matplotlib is an extra

Array = np.ndarray[Any, np.dtype[np.float64]]
# Steps, and the values of one metric of one run; NaN where one was not finite.
Curve = tuple[Array, Array]

JOB_LIMIT_S = 2.0  # of a drawing at the end of a job, while all its ranks wait

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


class LoggedRun(NamedTuple):
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
    """Run a command line, and return its exit code: 0, or 2 with one line on stderr.

    Raises SystemExit, with 2 for a malformed command line and 0 after --help.
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
    try:
        output = _draw(options.runs, options.metric, options.output, log=options.log)
    except (OSError, ValueError) as error:
        print(f"mntrain: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


def draw_at_end(run_dir: Path) -> str:
    """Draw loss.svg of a run, and return why there is none, empty if there is. Local.

    In a process of its own, which is ended after `JOB_LIMIT_S`.
    """
    command = [sys.executable, "-m", "mntrain", "plot", str(run_dir)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            errors="replace",
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=JOB_LIMIT_S,
        )
    except OSError as error:
        return f"{error}; python -m mntrain plot {run_dir} draws it"
    except subprocess.TimeoutExpired:
        return f"it took more than {JOB_LIMIT_S:g} s; python -m mntrain plot {run_dir} draws it"
    lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix("mntrain: ") if done.returncode else ""


def _draw(paths: Sequence[Path], metrics: Sequence[str], output: Path | None, *, log: bool) -> Path:
    if output is None:
        name = "-".join(metrics).replace("/", "-") + Path(PLOT_FILE).suffix
        output = paths[0] / name if len(paths) == 1 else Path(name)
    runs = read_runs(paths)
    panels = [curves_of(runs, metric) for metric in dict.fromkeys(metrics)]
    if find_spec("matplotlib") is None:
        raise ValueError(
            "plot needs matplotlib, which is not installed: pip install 'mntrain[plot]'"
        )
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}")
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # in the names of runs
        figure = make_figure([run.label for run in runs], panels, log=log)
        figure.savefig(content, format=output.suffix.removeprefix(".").lower(), dpi=160)
    write_whole(output, content.getvalue())
    return output


def read_runs(paths: Sequence[Path]) -> list[LoggedRun]:
    """Return runs, labelled by their folders' names, or by the paths if names are not unique.

    Raises ValueError for a run that has no steps.
    """
    runs = []
    for path in paths:
        if not (path / METRICS_FILE).exists():
            raise ValueError(f"{path} has no {METRICS_FILE}: give the folder of a run")
        lines = [flatten(line) for line in read_metrics(path) if _is_number(line.get("step"))]
        if not lines:
            raise ValueError(f"{path}: its {METRICS_FILE} has no step yet")
        runs.append(LoggedRun(path.resolve().name, path, lines))
    unique = len({run.label for run in runs}) == len(runs)
    return runs if unique else [run._replace(label=str(run.path)) for run in runs]


def curves_of(runs: Sequence[LoggedRun], metric: str) -> dict[str, list[Curve | None]]:
    """Return the curves of a metric and of its evaluations by name, each by run.

    Raises ValueError if a run has neither.
    """
    known = {name for run in runs for name in run.names}
    base = metric if {metric, f"eval_{metric}"} & known else f"metrics/{metric}"
    curves = {name: [run.curve(name) for run in runs] for name in (base, f"eval_{base}")}
    for run, found in zip(runs, zip(*curves.values(), strict=True), strict=True):
        if not any(found):
            raise ValueError(
                f"--metric {metric}: {run.path} has no value of it; it has {', '.join(run.names)}"
            )
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
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    colours: list[Any] = ["C0", "C1"]  # of a single run, and of its evaluations
    if len(labels) > 1:
        colours = [mpl.colormaps["turbo"](shade) for shade in np.linspace(0, 1, len(labels))]
    figure = Figure(figsize=(8.0, 4.2 * len(panels)), layout="constrained")
    every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    handles: dict[str, Line2D] = {}
    for axes, panel in zip(every, panels, strict=True):
        for curve, style, run in _curves_with_styles(panel):
            points = _POINTS if len(curve[0]) < _SHORT else {}
            colour = colours[run if len(labels) > 1 else int(style == "evaluation")]
            [line] = axes.plot(*curve, color=colour, **{**_STYLES[style], **points})
            handles[style] = line
        axes.set_ylabel(next(iter(panel)))
        axes.set_yscale("log" if log else "linear")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
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


def _curves_with_styles(
    panel: Mapping[str, Sequence[Curve | None]],
) -> Iterator[tuple[Curve, str, int]]:
    """Yield each line of a panel, its style, and the number of its run."""
    for name, by_run in panel.items():
        evaluation = name.startswith("eval_")
        for run, curve in enumerate(by_run):
            if curve is not None:
                yield curve, "evaluation" if evaluation else "each step", run
                if not evaluation and (means := running_mean(curve[1])) is not None:
                    yield (curve[0], means), "running mean", run


def _legible(label: str) -> str:
    """Return a label in rows that fit, in which matplotlib finds no formula and nothing hidden."""
    printable = "".join(c if c.isprintable() else "\ufffd" for c in label)
    visible = f"./{printable}" if printable.startswith("_") else printable
    return textwrap.fill(visible, _LABEL_LENGTH).replace("$", r"\$")
