"""A plot of the results: bandwidth against size, one panel for each collective."""

from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from mntrain.bench.bench_options import ALGORITHMS, size_label
from mntrain.bench.results import BenchResults

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors that are visible on white and on black: the background is transparent.
_INK = "#808890"
_COLORS = dict(zip(ALGORITHMS, cycle(("#2f87d6", "#d9822b", "#3f9e6b", "#a678c9"))))
_NATIVE_COLOR = "#d65068"
_PANEL_INCHES = (4.6, 3.4)


def missing() -> str:
    """Return why no plot can be drawn here, and the fix; "" if one can."""
    if find_spec("matplotlib"):
        return ""
    return "a plot needs matplotlib, which is not installed: pip install 'mntrain[plot]'"


def plot(results: BenchResults, path: Path) -> None:
    """Write a PNG file. Both axes are logarithmic. A collective without times has no panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    verbs = list(dict.fromkeys(case.verb for case in results.timed))
    columns = min(2, max(1, len(verbs)))
    rows = max(1, -(-len(verbs) // columns))
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    for index, verb in enumerate(verbs, 1):
        _panel(figure.add_subplot(rows, columns, index), results, verb)
    facts = results.facts
    figure.suptitle(f"{facts['topology']}, {facts['library']}", color=_INK, fontsize=10)
    figure.savefig(path, dpi=160, transparent=True)


def _panel(axes: "Axes", results: BenchResults, verb: str) -> None:
    """Draw one collective: a line for each algorithm, and the limit dashed."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415 - an extra

    cases = [case for case in results.timed if case.verb == verb]
    for name in dict.fromkeys(case.algorithm for case in cases):
        line = [case for case in cases if case.algorithm == name]
        axes.plot(
            [case.size_bytes for case in line],
            [case.bandwidth / 1e6 for case in line],
            marker="o",
            markersize=3.5,
            linewidth=1.6,
            label=name,
            color=_COLORS.get(name, _NATIVE_COLOR),
        )
    sizes = sorted({case.size_bytes for case in cases})
    limit = [nbytes / results.limits.seconds(verb, nbytes) / 1e6 for nbytes in sizes]
    axes.plot(sizes, limit, linestyle="--", linewidth=1.2, label="limit", color=_INK)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_label(nbytes) for nbytes in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_title(verb, color=_INK, fontsize=10)
    axes.set_xlabel("tensor size, bytes", color=_INK, fontsize=8)
    axes.set_ylabel("bandwidth, MB/s", color=_INK, fontsize=8)
    axes.tick_params(colors=_INK, which="both", labelsize=8)
    axes.grid(color=_INK, alpha=0.25, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    axes.legend(frameon=False, labelcolor=_INK, fontsize=8)
