"""A plot of the results: bandwidth against size, one panel for each collective."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mntrain.bench.bench_options import size_label
from mntrain.bench.results import BenchResults

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A grey that is visible on white and on black: the background is transparent.
_INK = "#808890"
_INK_SETTINGS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_STYLE: dict[Any, Any] = dict.fromkeys((*_INK_SETTINGS, "grid.color"), _INK) | {"font.size": 8}
_PANEL_INCHES = (4.6, 3.4)


def missing() -> str:
    """Return why no plot can be drawn here, and the fix; "" if one can."""
    if find_spec("matplotlib"):
        return ""
    return "a plot needs matplotlib, which is not installed: pip install 'mntrain[plot]'"


def plot(results: BenchResults, path: Path) -> None:
    """Write a PNG file. Both axes are logarithmic. A collective without times has no panel."""
    from matplotlib import rc_context  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    verbs = list(dict.fromkeys(case.verb for case in results.cases if case.timed))
    columns = min(2, max(1, len(verbs)))
    rows = max(1, -(-len(verbs) // columns))
    width, height = _PANEL_INCHES
    with rc_context(_STYLE):
        figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
        for index, verb in enumerate(verbs, 1):
            _panel(figure.add_subplot(rows, columns, index), results, verb)
        figure.suptitle(f"{results.facts['topology']}, {results.facts['library']}")
        figure.savefig(path, dpi=160, transparent=True)


def _panel(axes: "Axes", results: BenchResults, verb: str) -> None:
    """Draw one collective: a line for each algorithm, and the limit dashed."""
    from matplotlib.ticker import LogLocator  # noqa: PLC0415 - an extra

    cases = [case for case in results.cases if case.verb == verb and case.timed]
    for name in dict.fromkeys(case.algorithm for case in cases):
        points = [
            (case.size_bytes, case.bandwidth / 1e6) for case in cases if case.algorithm == name
        ]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, label=name)
    sizes = sorted({case.size_bytes for case in cases})
    limit = [nbytes / results.limits.seconds(verb, nbytes) / 1e6 for nbytes in sizes]
    axes.plot(sizes, limit, linestyle="--", label="limit", color=_INK)
    axes.set(title=verb, xlabel="tensor size, bytes", ylabel="bandwidth, MB/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_label(nbytes) for nbytes in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
