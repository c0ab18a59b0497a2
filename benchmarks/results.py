"""Pages of results for all benchmarks: facts of a measurement, tables, files."""

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
MIB = 2**20
TIMES = "× compute only"  # noqa: RUF001 - a multiplication sign


def facts() -> dict[str, Any]:
    """Return the date, the machine, its load, and the command.

    Call it before the jobs: the load then tells whether the machine was idle. Other work slows
    candidates that poll more than candidates that sleep, so it may change their order.
    """
    return {
        "load": os.getloadavg()[0],
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def heading(page: dict[str, Any], title: str, versions: Mapping[str, str], about: str) -> list[str]:
    """Return the first lines of a page: its title, what was measured where, command and note."""
    line = f"{page['date']}; {page['machine']}, load before: {page['load']:.1f}; "
    line += ", ".join(f"{name} {number}" for name, number in versions.items())
    words = " ".join(filter(None, [f"{line}.", about, "Command:"]))
    lines = [f"# {title}", "", words, "", f"    {page['command']}", ""]
    return [*lines, *([page["note"], ""] if "note" in page else [])]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> list[str]:
    """Return a Markdown table: its first columns are `texts`, the others numbers."""
    rule = "|---" * texts + "|--:" * (len(head) - texts) + "|"
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return [first, rule, *others]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format the median, and the least and the largest value."""
    middle, low, high = (f"{f(values):.{digits}f}" for f in (median, min, max))
    return f"{middle} ({low} to {high})"


def ratios(values: Iterable[float], bases: Iterable[float]) -> list[float]:
    """Return the ratios of values to those that were measured with them."""
    return [value / base for value, base in zip(values, bases, strict=True)]


def ms(seconds: float) -> str:
    """Format milliseconds with three digits."""
    figure = seconds * 1e3
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"


def size_label(mib: float) -> str:
    """Format a size in KiB or MiB."""
    return f"{mib:g} MiB" if mib >= 1 else f"{mib * 1024:g} KiB"


def save(output: Path, name: str, page: dict[str, Any]) -> None:
    """Write the figures of a page, with each list of numbers on a line of its own."""
    text = json.dumps(page, indent=1)
    text = re.sub(r"\[[\d\s.,e+-]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    folder = output / "results"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(text + "\n")


def write(output: Path, name: str, lines: Sequence[str]) -> None:
    """Write a page to output/results, and print it."""
    text = "\n".join(lines) + "\n"
    folder = output / "results"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)
    print(text, flush=True)
