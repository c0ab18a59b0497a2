"""Charts of a page, drawn by matplotlib as SVG that stands in HTML. One process, no display."""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

# ruff: noqa: PLC0415 - matplotlib is an extra

Array = np.ndarray[Any, np.dtype[np.float64]]
# Steps, and the values of one metric of one run; NaN where one was not finite.
Curve = tuple[Array, Array]

_WIDTH, _HEIGHT = 4.4, 2.7  # inches: as wide as a phone
SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_STYLE: Any = {
    "font.size": 9.0,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": None,  # ids are random, and so unique in a page
    "font.family": "sans-serif",
    "path.simplify_threshold": 0.5,  # of a pixel, in curves of many steps
    "text.parse_math": False,
}
_LABEL = 24  # characters
_SLOW = "tab:red"
_SMOOTHED = 40  # the running mean spans a 40th of a curve
_SHORT = 20  # a curve of fewer points shows each of them
_POINTS = {"marker": "o", "markersize": 3.5}
_STYLES: dict[str, dict[str, Any]] = {
    "each step": {"linewidth": 0.8, "alpha": 0.4, "zorder": 2},
    "running mean": {"linewidth": 1.6, "zorder": 3},
    "evaluation": {"linewidth": 1.0, "linestyle": "--", "zorder": 4, **_POINTS},
}


def curves(panel: Mapping[str, Sequence[Curve | None]]) -> Markup:
    """Return the curves of a metric and its evaluations, each by run."""
    runs = len(next(iter(panel.values())))

    def draw(axes: "Axes") -> None:
        handles = _draw_panel(axes, panel, colours_of(runs))
        axes.set(xlabel="step")
        axes.locator_params(axis="x", integer=True)
        if runs == 1 and len(handles) > 1:
            axes.legend(handles.values(), handles, frameon=False, fontsize="small")

    return _draw(draw)


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


def colours_of(runs: int) -> list[Any]:
    """Return a colour for each of several runs; those of a run and of its evaluations for one."""
    import matplotlib as mpl

    if runs == 1:
        return ["C0", "C1"]
    return [mpl.colormaps["turbo"](shade) for shade in np.linspace(0, 1, runs)]


def _draw_panel(
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
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return handles


def by_rank_and_step(curves: Mapping[str, Curve], unit: str) -> Markup:
    """Return the curves of ranks over the steps, by label."""

    def draw(axes: "Axes") -> None:
        colours = colours_of(max(2, len(curves)))
        for (label, curve), colour in zip(curves.items(), colours, strict=False):
            axes.plot(*curve, label=label, color=colour, linewidth=0.8)
        axes.set(xlabel="step")
        axes.locator_params(axis="x", integer=True)
        _finish(axes, unit, legend=True)

    return _draw(draw)


def by_rank(
    parts: Mapping[str, Sequence[float]],
    unit: str,
    slow: Sequence[int] = (),
    labels: Sequence[str] | None = None,
) -> Markup:
    """Return a bar for each rank, of parts that add up. Bars of `slow` ranks are red.

    With `labels`, the bars are those of runs with these names.
    """

    def draw(axes: "Axes") -> None:
        bottom = np.zeros(len(next(iter(parts.values()))))
        for number, (name, values) in enumerate(parts.items()):
            at = range(len(values))
            colours = [_SLOW if rank in slow else f"C{number}" for rank in at]
            axes.bar(at, values, bottom=bottom, label=name, color=colours)
            bottom += values
        if labels is None:
            axes.set(xlabel="rank")
            axes.locator_params(axis="x", integer=True)
        else:
            axes.set_xticks(range(len(labels)), list(map(_short, labels)), rotation=30, ha="right")
        _finish(axes, unit, legend=len(parts) > 1)

    return _draw(draw)


def _draw(draw: Callable[["Axes"], None]) -> Markup:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    content = io.BytesIO()
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # in the names of runs
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        draw(figure.subplots())
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(content, format="svg", metadata=none)
    return _embedded(content.getvalue())


def _short(label: str) -> str:
    """Return the end of a label, which leaves room for the chart, in characters that XML has."""
    printable = "".join(c if c.isprintable() else "\ufffd" for c in label)
    long = len(printable) > _LABEL
    return f"\N{HORIZONTAL ELLIPSIS}{printable[1 - _LABEL :]}" if long else printable


def _finish(axes: "Axes", unit: str, *, legend: bool) -> None:
    from matplotlib.ticker import EngFormatter

    axes.yaxis.set_major_formatter(EngFormatter(unit=unit))
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        place: dict[str, Any] = {"loc": "outside upper center"}
        columns = 3 if len(axes.get_legend_handles_labels()[1]) in (5, 6) else 4
        axes.figure.legend(ncols=columns, frameon=False, fontsize="small", **place)


def _embedded(svg: bytes) -> Markup:
    """Return an SVG file as an element of HTML, with those ids that are used."""
    root = ElementTree.fromstring(svg)
    used = set(re.findall(rb'(?:url\(#|href="#)([^)"]+)', svg))
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{SVG}}}")
        for name, value in list(element.attrib.items()):
            if name == "id" and value.encode() not in used:
                del element.attrib[name]
            elif name == f"{{{_LINK}}}href":
                del element.attrib[name]
                element.attrib["href"] = value
    for style in root.findall("defs/style/.."):
        root.remove(style)  # it would hold for the whole page
    del root.attrib["width"], root.attrib["height"]
    return Markup(ElementTree.tostring(root, encoding="unicode", short_empty_elements=False))
