"""The HTML page of a report: sections of charts, tables and texts, in a template.

Text from outside (names of runs, metrics and hosts, paths, options) is escaped by the template,
and by matplotlib in charts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup
from rich.filesize import decimal

from mntrain.metrics.registry import count_text, short_time

_BYTES = re.compile(r"(^|_)(bytes|memory)$")
_SHARE = re.compile(r"(^|_)(share|efficiency)$|^utilisation$")


class Table(NamedTuple):
    """A table, in which the first cell of a row names it. `folded`, it opens under these words."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: str = ""


@dataclass
class Section:
    """A part of a page; one without content is left out."""

    title: str
    charts: list[tuple[str, Markup]] = field(default_factory=list)  # a title, and SVG
    texts: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def add(self, table: Table) -> None:
        """Add a table, unless it has no rows."""
        if table.rows:
            self.tables.append(table)


def render(
    title: str, notes: Sequence[str], legend: Sequence[tuple[str, str]], sections: Iterable[Section]
) -> str:
    """Return the page. `legend` has the runs and their colours in the charts."""
    environment = Environment(
        autoescape=True, finalize=_printable, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(files(__package__).joinpath("page.html").read_text("utf-8"))
    shown = [s for s in sections if s.charts or s.texts or s.tables]
    return template.render(title=title, notes=notes, legend=legend, sections=shown) + "\n"


def table_of(rows: Sequence[Mapping[str, Any]], title: str = "", folded: str = "") -> Table:
    """Return a table of records with the same names; values that are records are left out."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    plain = [n for n in names if not any(isinstance(row.get(n), Mapping) for row in rows)]
    cells = [[text_of(name, row.get(name)) for name in plain] for row in rows]
    return Table(title, [words(name) for name in plain], cells, folded)


def side_by_side(
    labels: Sequence[str], by_run: Sequence[Mapping[str, Any]], title: str = "", folded: str = ""
) -> Table:
    """Return a table with a column for each run, and a row for each name that any has."""
    names = dict.fromkeys(name for values in by_run for name in values)
    rows = [[words(n), *(text_of(n, values.get(n)) for values in by_run)] for n in names]
    return Table(title, ["", *labels] if len(labels) > 1 else [], rows, folded)


def words(name: str) -> str:
    """Return a name in words, unless it is that of an option."""
    if "." in name:
        return name
    return re.sub("_per_s$", "/s", name).removesuffix("_s").replace("_", " ")


def text_of(name: str, value: Any) -> str:
    """Return a value of summary.json, config.toml or alike, by its name, which tells its unit."""
    if isinstance(value, list | tuple):
        return ", ".join(text_of(name, item) for item in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number_text(name, value)
    words = {None: "\N{EN DASH}", True: "yes", False: "no"}
    return words[value] if value in words else str(value)


def _number_text(name: str, value: float) -> str:
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:.3g} TFLOP/s"
    if name.endswith("_per_s"):
        return count_text(value) if value < 1e9 else f"{value:.3g}"
    if name.endswith(("_s", "seconds")):
        return short_time(value) if value < 60 else str(timedelta(seconds=round(value)))
    if _SHARE.search(name):
        return f"{value:.1%}"
    if _BYTES.search(name):
        return decimal(round(value)) if value >= 0 else f"-{decimal(round(-value))}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _printable(value: Any) -> Any:
    """Return text without control characters; what is markup already, as a chart, as it is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in value)
