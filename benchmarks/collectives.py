"""Benchmark collectives on emulated nodes: every algorithm, the MPI library's own, and gloo.

    sudo python benchmarks/collectives.py [--layouts 2,2 2] [--link 1gbit] [--other-python PATH]

A layout is the number of ranks on each node. Nodes are network namespaces connected by links of the
given rate; a single node has no network. Each layout is one job in which all candidates take turns.
With `--other-python`, the Python of an environment with another MPI, a second job does the same
there. Prints tables, writes them and all figures to docs/results/, and plots to docs/img/. Takes
about 7 minutes per MPI.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from typing import Any

import figures
import option_types
from emulated import HERE, Layout, facts, folders, heading, need_nodes, nodes, table, write

from mntrain.bench.hardware_limits import HardwareLimits

MIB = 2**20
VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
PEERS = ("mpi", "gloo", "horovod")
LARGE_MIB = 128  # larger tensors take long between nodes: first layout only


def main() -> int:
    """Measure every layout, and write pages and plots."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    layouts = ["2,2", "2", "1,1,1,1", "2,1,3"]
    sizes = [4 / 1024, 64 / 1024, 1, 16, 64, 256]
    positive = option_types.positive
    parser.add_argument(
        "--layouts", nargs="+", type=option_types.layout, default=layouts, metavar="N,N"
    )
    parser.add_argument(
        "--link", type=option_types.rate, default="1gbit", help="rate of each node's link, in gbit"
    )
    parser.add_argument("--mib", type=positive, nargs="*", default=sizes, help="for all_reduce")
    parser.add_argument("--other-mib", type=positive, nargs="*", default=[1, 16, 64])
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=VERBS, metavar="VERB")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, metavar="PEER")
    parser.add_argument("--other-python", type=Path, help="of an environment with another MPI")
    parser.add_argument(
        "--case-s", type=positive, default=6, help="seconds per collective and size"
    )
    parser.add_argument("--suffix", default="", help="of the names of the results files")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    options = parser.parse_args()
    need_nodes()
    for number, text in enumerate(options.layouts):
        layout = Layout.of(text, options.link)
        page = measure(layout, options, first=number == 0)
        publish(page, f"collectives-{layout.name}{options.suffix}", options.output)
    return 0


def measure(layout: Layout, options: argparse.Namespace, *, first: bool) -> dict[str, Any]:
    """Measure one layout under every MPI. Returns all figures, one row per candidate and size."""
    sizes = [mib for mib in options.mib if first or not layout.link or mib <= LARGE_MIB]
    arguments = ["--mib", *sizes, "--other-mib", *options.other_mib, "--case-s", options.case_s]
    arguments += ["--verbs", *options.verbs, "--peers", *options.peers]
    before = facts()
    pythons = [Path(sys.executable)] + ([options.other_python] if options.other_python else [])
    jobs = []
    for python in pythons:
        print(f"{layout}: {python}", file=sys.stderr)
        with nodes(layout) as running:
            jobs.append(running.run("collectives.py", arguments, python.absolute()))
    copy = {int(c["mib"] * MIB): c["mib"] * MIB / c["together_s"] for c in jobs[0]["copies"]}
    limits = HardwareLimits(layout.ranks, layout.bytes_per_s, copy)
    for job in jobs:
        for row in job["rows"]:
            row["limit_s"] = limits.seconds(row["verb"], int(row["mib"] * MIB))
            row["share_of_limit"] = row["limit_s"] / row["median_s"]
    limit = limit_description(layout, limits)
    return {**before, "layout": str(layout), "limit": limit, "jobs": jobs}


def limit_description(layout: Layout, limits: HardwareLimits) -> str:
    """Describe the limit in words."""
    if layout.bytes_per_s is None:
        return f"{limits.description}. A separate row has the time of a copy by one rank alone"
    return (
        f"{limits.description.replace('measured', 'shaped')}. A link of {layout.link} carries "
        f"{layout.bytes_per_s / 1e6:g} MB/s of payload in each direction. The bf16 wire is "
        "compared with the limit of fp32, so its own limit is 200 %. A link passes bursts of 128 "
        "KiB without delay, so short messages can exceed the limit"
    )


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page as Markdown and JSON, and plot all_reduce."""
    results, images = folders(output)
    write(results, name, page, report(page, name))
    if any(row["verb"] == "all_reduce" for row in page["jobs"][0]["rows"]):
        plot(page, images / f"{name}.svg")


def report(page: dict[str, Any], name: str) -> str:
    """Return the page as Markdown."""
    jobs = page["jobs"]
    verbs = list(dict.fromkeys(row["verb"] for row in jobs[0]["rows"]))
    about = (
        "fp32. Each figure is the median time of "
        "the slowest rank in milliseconds, with the speed as a percentage of the limit's. All "
        "candidates of one MPI take turns in one job, in random order, and every result is "
        "verified."
    )
    title = f"Collectives, {page['layout']}"
    lines = heading(page, title, jobs[0]["versions"], about)
    lines.append(f"The limit is {page['limit']}.")
    for verb in verbs:
        whole = of_sizes(jobs, verb, cell, limit_rows(jobs[0], verb))
        lines += ["", f"## {verb}", "", *whole]
        if all("cpu_s" in row for row in jobs[0]["rows"]):
            lines += ["", f"CPU of a rank for {verb}, in milliseconds: user and system seconds "]
            lines[-1] += "of all its threads, the mean over ranks, the median over turns."
            lines += ["", *of_sizes(jobs, verb, lambda row: ms(row["cpu_s"]))]
    if "all_reduce" in verbs:
        lines += ["", f"![all_reduce: % of the limit against size](../img/{name}.svg)"]
    absent = [(job, *peer) for job in jobs for peer in job["absent"].items()]
    if absent:
        lines += ["", "Not available:", ""]
        lines += [f"- {peer} with {job['library']}: {reason}" for job, peer, reason in absent]
    return "\n".join(lines) + "\n"


def of_sizes(
    jobs: list[dict[str, Any]],
    verb: str,
    cell: Callable[[dict[str, Any]], str],
    more: Sequence[list[str]] = (),
) -> list[str]:
    """Return a Markdown table: candidates by sizes, and `more` rows."""
    rows = [row for row in jobs[0]["rows"] if row["verb"] == verb]
    sizes = sorted({row["mib"] for row in rows})
    found: list[list[str]] = []
    for job in jobs:
        if len(jobs) > 1:
            found.append([f"**{job['library']}**", *[""] * len(sizes)])
        job_rows = [row for row in job["rows"] if row["verb"] == verb]
        cells = {(row["what"], row["mib"]): row for row in job_rows}
        names = dict.fromkeys(row["what"] for row in job_rows)
        found += [[what, *(cell(cells[what, size]) for size in sizes)] for what in names]
    return table(["", *map(size_label, sizes)], [*found, *more])


def limit_rows(job: dict[str, Any], verb: str) -> list[list[str]]:
    """Return the last rows of a table: the limit, and a copy by one rank within a node."""
    limits = {row["mib"]: row["limit_s"] for row in job["rows"] if row["verb"] == verb}
    found = [["*limit*", *(ms(limits[size]) for size in sorted(limits))]]
    if alone := {copy["mib"]: copy["alone_s"] for copy in job["copies"]}:
        found.append(["*copy by one rank alone*", *(ms(alone[size]) for size in sorted(limits))])
    return found


def cell(row: dict[str, Any]) -> str:
    """Format the time and the percentage of the limit."""
    return f"{ms(row['median_s'])} ({row['share_of_limit']:.0%})"


def ms(seconds: float) -> str:
    """Format milliseconds with three digits."""
    figure = seconds * 1e3
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"


def size_label(mib: float) -> str:
    """Format a size in KiB or MiB."""
    return f"{mib:g} MiB" if mib >= 1 else f"{mib * 1024:g} KiB"


def plot(page: dict[str, Any], path: Path) -> None:
    """Plot the percentage of the limit against size, one line per candidate of all_reduce."""
    lines: dict[str, list[tuple[float, float]]] = {}
    candidates: dict[str, str] = {}  # by line: the candidate, whichever MPI it ran with
    for job in page["jobs"]:
        suffix = "" if job is page["jobs"][0] else f", {job['library'].rpartition(' ')[0]}"
        for row in job["rows"]:
            if row["verb"] == "all_reduce":
                line = row["what"] + suffix
                lines.setdefault(line, []).append((log2(row["mib"]), row["share_of_limit"]))
                candidates[line] = row["what"]
    colors = figures.line_colors(list(dict.fromkeys(candidates.values())))
    sizes = sorted({x for points in lines.values() for x, _ in points})
    figures.line_chart(
        path,
        f"All-reduce, {page['layout']}",
        lines,
        colors={line: colors[what] for line, what in candidates.items()},
        dashed=[line for line, what in candidates.items() if line != what],
        x_label="tensor size",
        y_label="% of the limit",
        x_ticks={x: size_label(2**x) for x in sizes},
        percent=True,
    )


if __name__ == "__main__":
    sys.exit(main())
