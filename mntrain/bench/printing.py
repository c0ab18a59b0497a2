"""Results on the terminal: a few lines of facts, then a table for each collective."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mntrain.bench.bench_options import size_label
from mntrain.bench.results import BenchResults
from mntrain.metrics.terminal import plain
from mntrain.metrics.units import short_time

_PADDING = 2  # columns that rich adds to a cell
_LOG_WIDTH = 110  # columns if the output is not a terminal


def show(results: BenchResults, console: Console) -> None:
    """Print the facts, the tables, and which cases were skipped or wrong."""
    if not console.is_terminal:
        console.width = max(console.width, _LOG_WIDTH)
    for line in header(results):
        console.print(plain(line, console.encoding), soft_wrap=True)
    for table in tables(results, console.width):
        console.print()
        console.print(table)
    for line in footer(results):
        console.print(plain(line, console.encoding), soft_wrap=True)


def header(results: BenchResults) -> list[str]:
    """Return lines that describe the machine, the versions and the limits."""
    facts, limits = results.facts, results.limits
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    largest, copy = max(limits.copy.items())
    speeds = [f"memcpy {speed(copy)} a rank, all ranks at once ({size_label(largest)})"]
    if limits.link is not None:
        speeds.insert(0, f"link {speed(limits.link)} each way")
    return [
        f"{facts['topology']}, {facts['library']}",
        f"{versions}; {facts['date']}",
        ", ".join(speeds),
        f"{facts['dtype']}; median time, and the speed as a percentage of the limit's",
        f"limit: {limits.description}",
    ]


def footer(results: BenchResults) -> list[str]:
    """Return lines on the cases that have no time in the tables, and why."""
    lines = [
        f"{case.verb} {size_label(case.size_bytes)} by {case.algorithm}: a wrong result "
        f"on rank {', '.join(map(str, case.wrong_ranks))}"
        for case in results.wrong
    ]
    if results.skipped:
        lines.append("-: skipped for lack of time; increase --seconds")
    return [""] * bool(lines) + lines


def tables(results: BenchResults, width: int) -> Iterator[Table]:
    """Yield tables of algorithms by sizes, one or more for each collective, to fit `width`."""
    cases = results.cases
    for verb in dict.fromkeys(case.verb for case in cases):
        names = list(dict.fromkeys(case.algorithm for case in cases if case.verb == verb))
        sizes = sorted({case.size_bytes for case in cases if case.verb == verb})
        columns = {nbytes: _column(results, verb, nbytes, names) for nbytes in sizes}
        available = width - _PADDING - max(map(len, [verb, *names]))
        widths = [_PADDING + max(map(len, columns[nbytes])) for nbytes in sizes]
        for group in _groups(widths, available):
            yield _table(verb, names, [columns[sizes[index]] for index in group])


def _column(results: BenchResults, verb: str, nbytes: int, names: Sequence[str]) -> list[Text]:
    """Return the size and a cell for each algorithm, the fastest in bold."""
    cases = {c.algorithm: c for c in results.cases if (c.verb, c.size_bytes) == (verb, nbytes)}
    best_s = min((case.median_s for case in cases.values() if case.timed), default=0.0)
    cells = [Text(size_label(nbytes))]
    for case in map(cases.get, names):
        if case is None or not (case.times_s or case.wrong_ranks):
            cells.append(Text("-"))
        elif case.wrong_ranks:
            cells.append(Text("wrong", "red"))
        else:
            text = f"{short_time(case.median_s)} ({_percent(case.share)})"
            cells.append(Text(text, "bold" if case.median_s == best_s else ""))
    return cells


def _groups(widths: Sequence[int], available: int) -> Iterator[list[int]]:
    """Yield indices of columns that fit together into the available width, at least one."""
    group: list[int] = []
    for index, width in enumerate(widths):
        if group and sum(widths[i] for i in group) + width > available:
            yield group
            group = []
        group.append(index)
    yield group


def _table(verb: str, names: Sequence[str], columns: Sequence[Sequence[Text]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False)
    table.add_column(verb, no_wrap=True)
    for size, *_ in columns:
        table.add_column(size, justify="right", no_wrap=True)
    for name, *cells in zip(names, *(cells for _, *cells in columns), strict=True):
        table.add_row(name, *cells)
    return table


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def speed(bytes_per_s: float) -> str:
    """Format a speed in decimal units, as links are specified: 118 MB/s, 12.5 GB/s."""
    if bytes_per_s < 999.5e6:
        return f"{bytes_per_s / 1e6:.3g} MB/s"
    return f"{bytes_per_s / 1e9:.3g} GB/s"
