"""What a person sees of the results: a few lines of facts, then a table for each verb."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mntrain.bench.bench_options import size_label
from mntrain.bench.results import BenchResults
from mntrain.metrics.registry import format_duration
from mntrain.metrics.terminal import plain

_PADDING = 2  # columns of the terminal that rich puts around a cell
_LOG_WIDTH = 110  # where there is no terminal to fit into


def show(results: BenchResults, console: Console) -> None:
    """Print the facts, the tables, and what was left out or wrong."""
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
    """What was measured, where and when."""
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
        f"{facts['dtype']}; median time, and the share of the limit in parentheses",
        f"limit: {limits.meaning}",
    ]


def footer(results: BenchResults) -> list[str]:
    """What has no figure in the tables, and why."""
    lines = [
        f"{case.verb} {size_label(case.size_bytes)} by {case.algorithm}: a wrong result "
        f"on rank {', '.join(map(str, case.ranks))}"
        for case in results.wrong
    ]
    if results.skipped:
        lines.append("-: left out, since it would have taken too long; give more --seconds")
    return [""] * bool(lines) + lines


def tables(results: BenchResults, width: int) -> Iterator[Table]:
    """A table for each verb: algorithms by sizes; several where sizes do not fit into `width`."""
    cases = [*results.timed, *results.skipped, *results.wrong]
    for verb in dict.fromkeys(case.verb for case in cases):
        names = list(dict.fromkeys(case.algorithm for case in cases if case.verb == verb))
        sizes = sorted({case.size_bytes for case in cases if case.verb == verb})
        columns = {nbytes: _column(results, verb, nbytes, names) for nbytes in sizes}
        left = width - _PADDING - max(map(len, [verb, *names]))
        widths = [_PADDING + max(map(len, columns[nbytes])) for nbytes in sizes]
        for group in _groups(widths, left):
            yield _table(verb, names, [columns[sizes[index]] for index in group])


def _column(results: BenchResults, verb: str, nbytes: int, names: Sequence[str]) -> list[Text]:
    """The size, and a cell for each algorithm, the fastest bold."""
    here = (verb, nbytes)
    timed = {c.algorithm: c for c in results.timed if (c.verb, c.size_bytes) == here}
    wrong = {c.algorithm for c in results.wrong if (c.verb, c.size_bytes) == here}
    best_s = min((case.median_s for case in timed.values()), default=0.0)
    cells = [Text(size_label(nbytes))]
    for name in names:
        if name in timed:
            text = f"{short_time(timed[name].median_s)} ({_share(timed[name].share)})"
            cells.append(Text(text, "bold" if timed[name].median_s == best_s else ""))
        else:
            cells.append(Text("wrong", "red") if name in wrong else Text("-"))
    return cells


def _groups(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Indices of columns, as many together as there is room for, one at least."""
    group: list[int] = []
    for index, width in enumerate(widths):
        if group and sum(widths[i] for i in group) + width > room:
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


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


def short_time(seconds: float) -> str:
    """A time, also one much shorter than a step's: 21.3 us, 12.3 ms, 0.42 s."""
    return f"{seconds * 1e6:.3g} us" if seconds < 0.9995e-3 else format_duration(seconds)


def speed(bytes_per_s: float) -> str:
    """A speed in decimal units, as links are sold: 118 MB/s, 12.5 GB/s."""
    if bytes_per_s < 999.5e6:
        return f"{bytes_per_s / 1e6:.3g} MB/s"
    return f"{bytes_per_s / 1e9:.3g} GB/s"
