"""SVG figures drawn by matplotlib. The same data gives the same file."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

# mntrain in blues, baselines in amber, other libraries in greys and earth tones.
OURS = ("#2563eb", "#0891b2", "#7c3aed", "#60a5fa", "#1e3a8a", "#db2777")
OTHERS = ("#94a3b8", "#a16207", "#64748b", "#15803d", "#b91c1c", "#475569")
BASELINE, INK = "#d97706", "#0f172a"
STYLE = {
    "svg.hashsalt": "mntrain",  # reproducible ids
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#cbd5e1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e2e8f0",
}


def value_at(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """Return the y of a line at x, linear between its points; None outside of them."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def line_chart(
    path: Path,
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    colors: Mapping[str, str],
    x_label: str,
    y_label: str,
    x_ticks: Mapping[float, str] | None = None,
    percent: bool = False,
    dashed: Collection[str] = (),
    log_x: bool = False,
) -> None:
    """Write a chart of lines, with a legend in the order in which they end.

    `percent`: the y axis is a fraction shown in percent, with a line at 100 %.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.add_subplot()
        for name in sorted(lines, key=lambda name: -lines[name][-1][1]):
            xs, ys = zip(*lines[name], strict=True)
            axes.plot(
                xs,
                ys,
                label=name,
                color=colors[name],
                linestyle="--" if name in dashed else "-",
                marker="o" if len(xs) <= 12 else "",
                markersize=3.5,
            )
        if log_x:
            axes.set_xscale("log")
        if x_ticks:
            axes.set_xticks(list(x_ticks), list(x_ticks.values()))
        if percent:
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
            axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        axes.grid(axis="y")
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        figure.legend(loc="outside right center", frameon=False)
        _save(figure, path)


def bar_charts(
    path: Path, title: str, names: Sequence[str], panels: Mapping[str, Sequence[float]]
) -> None:
    """Write horizontal bar charts next to each other: by title, a value for each name."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 0.8 + 0.22 * len(names)), layout="constrained")
        figure.suptitle(title, fontweight="bold")
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)
        for axes, (panel, values) in zip(grid[0], panels.items(), strict=True):
            bars = axes.barh(names, values, color=[bar_color(name) for name in names])
            axes.bar_label(bars, fmt="{:.3g}", padding=3)
            axes.margins(x=0.15)
            axes.set_title(panel, fontsize=9)
            axes.set_xticks([])
        grid[0][0].invert_yaxis()
        _save(figure, path)


def bar_color(name: str) -> str:
    """Return the color of mntrain, of a baseline, or of another library."""
    if name.startswith("mntrain"):
        return OURS[3 if "wire" in name else 0]
    return BASELINE if name.startswith("compute") else OTHERS[0]


def line_colors(names: Sequence[str]) -> dict[str, str]:
    """Return a color for each name: blues for mntrain's."""
    ours = [name for name in names if name.startswith("mntrain")]
    others = [name for name in names if name not in ours]
    return {
        name: palette[index % len(palette)]
        for group, palette in ((ours, OURS), (others, OTHERS))
        for index, name in enumerate(group)
    }


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})
