"""Benchmark collectives on emulated nodes: every algorithm, the MPI library's own, and gloo.

    sudo python benchmarks/collectives.py [--layouts 2,2 2] [--link 1gbit] [--other-python PATH]

A layout is the number of ranks on each node. Nodes are network namespaces connected by links of the
given rate; a single node has no network. Each layout is one job in which all candidates take turns.
With `--other-python`, the Python of an environment with another MPI, a second job does the same
there. Prints tables, and writes them to docs/results/. Takes about 7 minutes per MPI.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from emulated import Layout, nodes
from results import DOCS, MIB, facts, heading, ms, size_label, table, write

from mntrain.bench.hardware_limits import minimum_traffic

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
PEERS = ("mpi", "gloo")
LARGE_MIB = 128  # larger tensors take long between nodes: first layout only
ABOUT = (
    "fp32. Each figure is the median time of the slowest rank in milliseconds, with the speed as a "
    "percentage of the limit's. All candidates of one MPI take turns in one job, in random order, "
    "and every result is verified."
)


def main() -> int:
    """Measure every layout, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    usual, sizes = ["2,2", "2", "1,1,1,1", "2,1,3"], [4 / 1024, 64 / 1024, 1, 16, 64, 256]
    parser.add_argument("--layouts", nargs="+", default=usual, metavar="N,N")
    parser.add_argument("--link", default="1gbit", help="rate of each node's link, in gbit")
    parser.add_argument("--mib", type=float, nargs="*", default=sizes, help="for all_reduce")
    parser.add_argument("--other-mib", type=float, nargs="*", default=[1, 16, 64])
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=VERBS, metavar="VERB")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, metavar="PEER")
    parser.add_argument("--other-python", type=Path, help="of an environment with another MPI")
    parser.add_argument("--case-s", type=float, default=6, help="seconds per collective and size")
    parser.add_argument("--suffix", default="", help="of the names of the results files")
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    layouts = [Layout.of(text, options.link) for text in options.layouts]
    for number, layout in enumerate(layouts):
        page = measure(layout, options, first=number == 0)
        publish(page, f"collectives-{layout.name}{options.suffix}", options.output)
    return 0


def measure(layout: Layout, options: argparse.Namespace, *, first: bool) -> dict[str, Any]:
    """Measure one layout under every MPI. Returns all figures, one row per candidate and size."""
    sizes = [mib for mib in options.mib if first or not layout.link or mib <= LARGE_MIB]
    arguments = ["--mib", *sizes, "--other-mib", *options.other_mib, "--case-s", options.case_s]
    arguments += ["--verbs", *options.verbs, "--peers", *options.peers]
    before, jobs = facts(), []
    for python in filter(None, (Path(sys.executable), options.other_python)):
        print(f"{layout}: {python}", file=sys.stderr)
        with nodes(layout) as running:
            jobs.append(running.run("collectives.py", arguments, python.absolute()))
    copy = {int(c["mib"] * MIB): c["mib"] * MIB / c["together_s"] for c in jobs[0]["copies"]}
    for job in jobs:
        for row in job["rows"]:
            row["limit_s"] = limit_seconds(layout, copy, row["verb"], int(row["mib"] * MIB))
            row["share_of_limit"] = row["limit_s"] / row["median_s"]
    limit = (
        "the time of a copy of the tensor in this node's memory while all ranks copy at once; a "
        "collective that touches less of it may be faster"
    )
    if layout.link:
        bytes_of = (f"{verb} {minimum_traffic(verb, layout.ranks):.3g} S" for verb in VERBS)
        limit = (
            "the bytes that a node must send or receive, over the speed of the shaped link; for S "
            f"bytes: {', '.join(bytes_of)}. A link of {layout.link} carries "
            f"{layout.bytes_per_s / 1e6:g} MB/s of payload in each direction. The bf16 wire is "
            "compared with the limit of fp32, so its own limit is 200 %. A link passes bursts of "
            "128 KiB without delay, so short messages can exceed the limit"
        )
    return {**before, "layout": str(layout), "limit": limit, "jobs": jobs}


def limit_seconds(layout: Layout, copy: Mapping[int, float], verb: str, nbytes: int) -> float:
    """Return the time that the hardware allows for a collective on a tensor of `nbytes` bytes.

    Between nodes: the bytes that some node must send or receive, over the link's speed. Within one
    node: a copy of the tensor by all ranks at once, at `copy[nbytes]` bytes/s, which a collective
    may beat if each rank touches only a part of it.
    """
    if layout.bytes_per_s is None:
        return nbytes / copy[nbytes]
    return minimum_traffic(verb, layout.ranks) * nbytes / layout.bytes_per_s


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page."""
    first = page["jobs"][0]
    lines = heading(page, f"Collectives, {page['layout']}", first["versions"], ABOUT)
    lines.append(f"The limit is {page['limit']}.")
    for verb in dict.fromkeys(row["verb"] for row in first["rows"]):
        limits = {row["mib"]: row["limit_s"] for row in first["rows"] if row["verb"] == verb}
        last = [["*limit*", *(ms(limits[size]) for size in sorted(limits))]]
        if alone := {copy["mib"]: copy["alone_s"] for copy in first["copies"]}:
            last.append(["*copy by one rank alone*", *(ms(alone[mib]) for mib in sorted(limits))])
        lines += ["", f"## {verb}", "", *of_sizes(page["jobs"], verb, cell, last)]
        lines += ["", f"CPU milliseconds of a rank for {verb}, of all its threads: the mean "]
        lines[-1] += "over ranks, the median over turns."
        lines += ["", *of_sizes(page["jobs"], verb, lambda row: ms(row["cpu_s"]))]
    write(output, name, lines)


def of_sizes(
    jobs: list[dict[str, Any]],
    verb: str,
    cell: Callable[[dict[str, Any]], str],
    more: Sequence[list[str]] = (),
) -> list[str]:
    """Return a Markdown table: candidates by sizes, and `more` rows."""
    sizes = sorted({row["mib"] for row in jobs[0]["rows"] if row["verb"] == verb})
    found: list[list[str]] = []
    for job in jobs:
        if len(jobs) > 1:
            found.append([f"**{job['library']}**", *[""] * len(sizes)])
        cells = {(row["what"], row["mib"]): row for row in job["rows"] if row["verb"] == verb}
        names = dict.fromkeys(what for what, _ in cells)
        found += [[what, *(cell(cells[what, size]) for size in sizes)] for what in names]
    return table(["", *map(size_label, sizes)], [*found, *more])


def cell(row: dict[str, Any]) -> str:
    """Format the time and the percentage of the limit."""
    return f"{ms(row['median_s'])} ({row['share_of_limit']:.0%})"


if __name__ == "__main__":
    sys.exit(main())
