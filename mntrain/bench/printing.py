"""Results on the terminal: a few lines of facts, then a table for each collective."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mntrain.bench.bench_options import size_label
from mntrain.bench.results import BenchCase, BenchResults
from mntrain.metrics.registry import short_time
from mntrain.metrics.report import plain

_LOG_WIDTH = 110  # columns if the output is not a terminal


def show(results: BenchResults, console: Console) -> None:
    """Print the facts, the tables, and which cases were skipped or wrong."""
    if not console.is_terminal:
        console.width = max(console.width, _LOG_WIDTH)
    for line in header(results):
        console.print(plain(line, console.encoding), soft_wrap=True)
    for table in tables(results):
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
        for case in results.cases
        if case.wrong_ranks
    ]
    if any(case.skipped for case in results.cases):
        lines.append("-: skipped for lack of time; increase --seconds")
    return [""] * bool(lines) + lines


def tables(results: BenchResults) -> Iterator[Table]:
    """Yield a table of sizes by algorithms for each collective, the fastest of a size in bold."""
    for verb in dict.fromkeys(case.verb for case in results.cases):
        cases = [case for case in results.cases if case.verb == verb]
        table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False)
        table.add_column(verb, no_wrap=True)
        for name in dict.fromkeys(case.algorithm for case in cases):
            table.add_column(name, justify="right")
        for nbytes in dict.fromkeys(case.size_bytes for case in cases):
            row = [case for case in cases if case.size_bytes == nbytes]
            best_s = min((case.median_s for case in row if case.timed), default=0.0)
            table.add_row(size_label(nbytes), *(_cell(case, best_s) for case in row))
        yield table


def _cell(case: BenchCase, best_s: float) -> Text:
    if case.wrong_ranks:
        return Text("wrong", "red")
    if case.skipped:
        return Text("-")
    percent = f"{case.share:.0%}" if case.share >= 0.0995 else f"{case.share:.1%}"
    style = "bold" if case.median_s == best_s else ""
    return Text(f"{short_time(case.median_s)} ({percent})", style)


def speed(bytes_per_s: float) -> str:
    """Format a speed in decimal units, as links are specified: 118 MB/s, 12.5 GB/s."""
    if bytes_per_s < 999.5e6:
        return f"{bytes_per_s / 1e6:.3g} MB/s"
    return f"{bytes_per_s / 1e9:.3g} GB/s"
