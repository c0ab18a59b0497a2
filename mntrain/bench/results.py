"""The results of a benchmark run, as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mntrain.bench.bench_options import size_label
from mntrain.metrics.registry import short_time


@dataclass(frozen=True)
class BenchCase:
    """One collective by one algorithm at one size."""

    verb: str
    algorithm: str
    size_bytes: int
    limit_s: float | None  # None on one node
    times_s: tuple[float, ...]  # of the slowest rank, by turn
    wrong_ranks: tuple[int, ...] = ()  # with a wrong result, which makes the times invalid

    @property
    def median_s(self) -> float:
        """The median time."""
        return median(self.times_s)

    @property
    def share(self) -> float | None:
        """The speed as a fraction of the limit's; above 1 where buffers take a short message."""
        return None if self.limit_s is None else self.limit_s / self.median_s

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, whose names carry units."""
        if self.wrong_ranks:
            names = ("verb", "algorithm", "size_bytes")
            return {name: getattr(self, name) for name in names} | {"ranks": self.wrong_ranks}
        return asdict(self) | {
            "median_s": self.median_s,
            "bandwidth_bytes_per_s": self.size_bytes / self.median_s,
            "share_of_limit": self.share,
        }


def show(facts: Mapping[str, Any], cases: Sequence[BenchCase], console: Console) -> None:
    """Print the facts, a table for each collective, and the wrong results."""
    if not console.is_terminal:
        console.width = max(console.width, 110)  # the tables are wider than the default
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [f"{facts['topology']}, {facts['library']}", f"{versions}; {facts['date']}"]
    if link := facts["link_bytes_per_s"]:
        lines += [
            f"link {link / 1e9:.3g} GB/s each way",
            "fp32; median time, and the speed as a percentage of the limit's",
            f"limit: {facts['limit']}",
        ]
    else:
        lines.append("fp32; median time")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    for verb in dict.fromkeys(case.verb for case in cases):
        console.print()
        console.print(_table(verb, [case for case in cases if case.verb == verb]))
    for case in cases:
        if case.wrong_ranks:
            ranks = ", ".join(map(str, case.wrong_ranks))
            what = f"{case.verb} {size_label(case.size_bytes)} by {case.algorithm}"
            console.print(f"{what}: a wrong result on rank {ranks}", soft_wrap=True)


def _table(verb: str, cases: Sequence[BenchCase]) -> Table:
    """Return a table of sizes by algorithms, with the fastest of a size in bold."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False)
    table.add_column(verb, no_wrap=True)
    for name in dict.fromkeys(case.algorithm for case in cases):
        table.add_column(name, justify="right")
    for nbytes in dict.fromkeys(case.size_bytes for case in cases):
        row = [case for case in cases if case.size_bytes == nbytes]
        best_s = min((case.median_s for case in row if not case.wrong_ranks), default=0.0)
        table.add_row(size_label(nbytes), *(_cell(case, best_s) for case in row))
    return table


def _cell(case: BenchCase, best_s: float) -> Text:
    if case.wrong_ranks:
        return Text("wrong", "red")
    share = "" if case.share is None else f" ({case.share:.1%})"
    return Text(f"{short_time(case.median_s)}{share}", "bold" if case.median_s == best_s else "")
