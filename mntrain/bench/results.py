"""The results of a benchmark run, as tables, and what they advise for training."""

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
from mntrain.options.config import CommConfig
from zero.layout import MIB

_PARAMETERS = 100_000_000  # of the example
_SIMILAR = 1.05  # algorithms whose times differ by less are about equally fast
# Gradients are rounded on the way if their bytes take this many times as long on the link as in
# memory.
_LINK_BOUND = 4.0

_ABOVE_LIMIT = (
    "faster than long streams between nodes or a copy of the whole tensor: small tensors fit into "
    "buffers and caches"
)


@dataclass(frozen=True)
class BenchCase:
    """One collective by one algorithm at one size."""

    verb: str
    algorithm: str
    size_bytes: int
    dtype: str
    limit_s: float
    times_s: tuple[float, ...] = ()  # of the slowest rank, by turn; empty if skipped
    wrong_ranks: tuple[int, ...] = ()  # with a wrong result, which makes the times invalid

    @property
    def timed(self) -> bool:
        """True if it has valid times."""
        return bool(self.times_s) and not self.wrong_ranks

    @property
    def median_s(self) -> float:
        """The median time."""
        return median(self.times_s)

    @property
    def share(self) -> float | None:
        """The speed as a fraction of the limit's; None if it is higher than the limit."""
        share = self.limit_s / self.median_s
        return share if share <= 1 else None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, whose names carry units."""
        if not self.timed:
            names = ("verb", "algorithm", "size_bytes")
            return {name: getattr(self, name) for name in names} | {"ranks": self.wrong_ranks}
        return asdict(self) | {
            "median_s": self.median_s,
            "bandwidth_bytes_per_s": self.size_bytes / self.median_s,
            "share_of_limit": self.share,
        }


def show(facts: Mapping[str, Any], cases: Sequence[BenchCase], console: Console) -> None:
    """Print the facts, a table for each collective, remarks on the cases, and advice."""
    if not console.is_terminal:
        console.width = max(console.width, 110)  # the tables are wider than the default
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    speeds = f"memcpy {facts['copy'][-1]['bytes_per_s'] / 1e9:.3g} GB/s a rank, all ranks at once"
    if link := facts["link_bytes_per_s"]:
        speeds = f"link {link / 1e9:.3g} GB/s each way, {speeds}"
    for line in (
        f"{facts['topology']}, {facts['library']}",
        f"{versions}; {facts['date']}",
        speeds,
        f"{facts['dtype']}; median time, and the speed as a percentage of the limit's",
        f"limit: {facts['limit']}",
    ):
        console.print(Text(line), soft_wrap=True)
    for verb in dict.fromkeys(case.verb for case in cases):
        console.print()
        console.print(_table(verb, [case for case in cases if case.verb == verb]))
    for case in cases:
        if case.wrong_ranks:
            ranks = ", ".join(map(str, case.wrong_ranks))
            what = f"{case.verb} {size_label(case.size_bytes)} by {case.algorithm}"
            console.print(f"{what}: a wrong result on rank {ranks}", soft_wrap=True)
    if any(case.timed and case.share is None for case in cases):
        console.print(f"> limit: {_ABOVE_LIMIT}", soft_wrap=True)
    if left_out := dict.fromkeys(size_label(case.size_bytes) for case in cases if not case.times_s):
        remark = f"left out {', '.join(left_out)} for lack of time; give more --seconds"
        console.print(f"-: {remark}", soft_wrap=True)
    if facts["advice"]:
        console.print()
        console.print(Text(facts["advice"]), soft_wrap=True)


def _table(verb: str, cases: Sequence[BenchCase]) -> Table:
    """Return a table of sizes by algorithms, with the fastest of a size in bold."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False)
    table.add_column(verb, no_wrap=True)
    for name in dict.fromkeys(case.algorithm for case in cases):
        table.add_column(name, justify="right")
    for nbytes in dict.fromkeys(case.size_bytes for case in cases):
        row = [case for case in cases if case.size_bytes == nbytes]
        best_s = min((case.median_s for case in row if case.timed), default=0.0)
        table.add_row(size_label(nbytes), *(_cell(case, best_s) for case in row))
    return table


def _cell(case: BenchCase, best_s: float) -> Text:
    if not case.timed:
        return Text("wrong", "red") if case.wrong_ranks else Text("-")
    style = "bold" if case.median_s == best_s else ""
    share = f"{case.share:.1%}" if case.share is not None else "> limit"
    return Text(f"{short_time(case.median_s)} ({share})", style)


def advice(facts: Mapping[str, Any], cases: Sequence[BenchCase]) -> str:
    """Return which options suit this cluster, and what a step costs; "" without evidence.

    The evidence is the all-reduce of the largest size, at least 1 MiB: that is how large buckets of
    gradients are. Smaller ones measure latency.
    """
    timed = [case for case in cases if case.timed and case.verb == "all_reduce"]
    largest = max((case.size_bytes for case in timed), default=0)
    if largest < MIB:
        return ""
    rivals = sorted((c for c in timed if c.size_bytes == largest), key=lambda c: c.median_s)
    best, text = rivals[0], ""
    if len(rivals) > 1:
        similar = [c.algorithm for c in rivals if c.median_s < _SIMILAR * best.median_s]
        default = CommConfig().algorithm
        text = (
            f"At {size_label(largest)}, {' and '.join(similar)} "
            + ("are the fastest algorithms" if len(similar) > 1 else "is the fastest algorithm")
            + " of all_reduce measured here: --comm.algorithm "
            + (f"{default}, the default. " if default in similar else f"{similar[0]}. ")
        )
    nbytes = 4 * _PARAMETERS
    step_s = best.median_s / largest * nbytes
    text += (
        f"Per step, the gradients of {_PARAMETERS // 10**6} million fp32 parameters "
        f"({nbytes // 10**6} MB) take about {short_time(step_s)} by {best.algorithm}, part of "
        "which is hidden behind backward"
    )
    copy_s = best.size_bytes / facts["copy"][-1]["bytes_per_s"]
    if facts["link_bytes_per_s"] and best.dtype == "fp32" and best.limit_s >= _LINK_BOUND * copy_s:
        # int8 has a quarter of the bytes. A step that computes for less than that hides none of
        # it, so rare exchanges are what is left.
        text += (
            f"; --comm.wire-dtype bf16 sends half the bytes between nodes, and takes about "
            f"{short_time(step_s / 2)}, and --comm.compress int8 {short_time(step_s / 4)}; where a "
            "step computes for less than that, --sync.mode sparseloco --sync.every 20 exchanges "
            "parameters rarely instead"
        )
    return f"{text}."
