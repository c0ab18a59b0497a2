"""Collectives on emulated nodes: every algorithm, beside the MPI library's own and gloo.

    sudo python benchmarks/collectives.py [--layouts 2,2 2] [--link 1gbit] [--other-python PATH]

A layout is the ranks of each node: nodes are network namespaces joined by links of the given rate,
one node has no network. A layout is one job, in which all candidates take turns; with
`--other-python`, the Python of an environment with another MPI, a second job does the same there,
and its rows stand below. Prints tables; writes them and every figure to docs/results/, and a
picture of the first layout to docs/img/. Takes about 7 minutes, and as many more with a second MPI.
"""

import argparse
import sys
from math import log2
from pathlib import Path
from typing import Any

import svg
import values
from emulated import HERE, Layout, facts, folders, imprint, need_nodes, nodes, write

from mntrain.bench.limits import HardwareLimits

MIB = 2**20
VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
PEERS = ("mpi", "gloo", "horovod")
LARGE_MIB = 128  # what is larger takes long between nodes: in the first layout only


def main() -> int:
    """Measure every layout, and write what came out."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = ["2,2", "2", "1,1,1,1", "2,1,3"]
    options.add_argument("--layouts", nargs="+", type=values.layout, default=default, metavar="N,N")
    options.add_argument(
        "--link", type=values.rate, default="1gbit", help="rate of each node's link, in gbit"
    )
    sizes = [4 / 1024, 64 / 1024, 1, 16, 64, 256]
    options.add_argument(
        "--mib", type=values.positive, nargs="*", default=sizes, help="for all_reduce"
    )
    options.add_argument("--other-mib", type=values.positive, nargs="*", default=[1, 16, 64])
    options.add_argument("--verbs", nargs="+", choices=VERBS, default=VERBS, metavar="VERB")
    options.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, metavar="PEER")
    options.add_argument("--other-python", type=Path, help="of an environment with another MPI")
    options.add_argument(
        "--case-s", type=values.positive, default=6, help="for each verb at each size"
    )
    options.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    given = options.parse_args()
    need_nodes()
    results, images = folders(given.output)
    for number, text in enumerate(given.layouts):
        layout = Layout.of(text, given.link)
        page = measure(layout, given, first=number == 0)
        page["pictured"] = number == 0 and "all_reduce" in given.verbs and bool(given.mib)
        write(results, f"collectives-{layout.name}", page, report(page))
        if page["pictured"]:
            (images / "collectives.svg").write_text(picture(page))
    return 0


def measure(layout: Layout, given: argparse.Namespace, *, first: bool) -> dict[str, Any]:
    """One layout under every MPI: a page of figures, one row a candidate, verb and size."""
    small = [mib for mib in given.mib if first or not layout.link or mib <= LARGE_MIB]
    arguments = ["--mib", *small, "--other-mib", *given.other_mib, "--case-s", given.case_s]
    arguments += ["--verbs", *given.verbs, "--peers", *given.peers]
    before = facts()
    pythons = [Path(sys.executable)] + ([given.other_python] if given.other_python else [])
    jobs = []
    for python in pythons:
        print(f"{layout}: {python}", file=sys.stderr)
        with nodes(layout) as up:
            jobs.append(up.run("collectives.py", arguments, python.absolute()))
    copy = {int(c["mib"] * MIB): c["mib"] * MIB / c["together_s"] for c in jobs[0]["copies"]}
    limits = HardwareLimits(layout.ranks, layout.bytes_per_s, copy)
    for job in jobs:
        for row in job["rows"]:
            row["limit_s"] = limits.seconds(row["verb"], int(row["mib"] * MIB))
            row["share_of_limit"] = row["limit_s"] / row["median_s"]
    return {**before, "layout": str(layout), "limit": meaning(layout, limits), "jobs": jobs}


def meaning(layout: Layout, limits: HardwareLimits) -> str:
    """What shares are of."""
    if layout.bytes_per_s is None:
        return f"{limits.meaning}. Another row says what it takes while one rank alone copies"
    return (
        f"{limits.meaning.replace('measured', 'shaped')}. A link of {layout.link} carries "
        f"{layout.bytes_per_s / 1e6:g} MB/s of the tensor each way. The bf16 wire carries half "
        "the bytes, and is measured against the limit of fp32: its own is at 200 %. A link lets "
        "128 KiB through at once, which a short message profits from"
    )


def report(page: dict[str, Any]) -> str:
    """The results as a page of Markdown."""
    jobs = page["jobs"]
    verbs = list(dict.fromkeys(row["verb"] for row in jobs[0]["rows"]))
    lines = [
        f"# Collectives, {page['layout']}",
        "",
        f"{imprint(page, jobs[0]['versions'])}. fp32; median milliseconds of the slowest rank, and "
        "the share of the limit's speed. All candidates of one MPI take turns in one job, in an "
        "order that changes, and every result is checked; by:",
        "",
        f"    {page['command']}",
        "",
        f"The limit is {page['limit']}.",
    ]
    for verb in verbs:
        lines += ["", f"## {verb}", "", *table(jobs, verb)]
    if page["pictured"]:
        lines += ["", "![share of the limit against size](../img/collectives.svg)"]
    lines += ["", "mntrain without more words is as it comes; that was, by its own measurement:"]
    lines += ["", *(f"- on {job['library']}: {job['auto'] or 'nothing to choose'}" for job in jobs)]
    absent = [(job, *peer) for job in jobs for peer in job["absent"].items()]
    if absent:
        lines += ["", "Absent:", ""]
        lines += [f"- {peer} on {job['library']}: {reason}" for job, peer, reason in absent]
    return "\n".join(lines) + "\n"


def table(jobs: list[dict[str, Any]], verb: str) -> list[str]:
    """Lines of Markdown: a candidate a row, a size a column, and the limit at the end."""
    rows = [row for row in jobs[0]["rows"] if row["verb"] == verb]
    sizes = sorted({row["mib"] for row in rows})
    lines = ["| | " + " | ".join(size_of(size) for size in sizes) + " |"]
    lines.append("|---|" + "--:|" * len(sizes))
    for job in jobs:
        if len(jobs) > 1:
            lines.append(f"| **{job['library']}** |" + " |" * len(sizes))
        found = [row for row in job["rows"] if row["verb"] == verb]
        cells = {(row["what"], row["mib"]): row for row in found}
        for what in dict.fromkeys(row["what"] for row in found):
            row = (cells[what, size] for size in sizes)
            lines.append(f"| {what} | " + " | ".join(map(cell, row)) + " |")
    limits = {row["mib"]: row["limit_s"] for row in rows}
    lines.append("| *limit* | " + " | ".join(ms(limits[size]) for size in sizes) + " |")
    if alone := {copy["mib"]: copy["alone_s"] for copy in jobs[0]["copies"]}:
        figures = " | ".join(ms(alone[size]) for size in sizes)
        lines.append(f"| *a copy by one rank alone* | {figures} |")
    return lines


def cell(row: dict[str, Any]) -> str:
    """One figure of the table."""
    return f"{ms(row['median_s'])} ({row['share_of_limit']:.0%})"


def ms(seconds: float) -> str:
    """Milliseconds, to three digits."""
    figure = seconds * 1e3
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"


def size_of(mib: float) -> str:
    """A size in the unit that suits it."""
    return f"{mib:g} MiB" if mib >= 1 else f"{mib * 1024:g} KiB"


def picture(page: dict[str, Any]) -> str:
    """The share of the limit against size, a line a candidate, of all-reduce."""
    lines: dict[str, list[tuple[float, float]]] = {}
    whats: dict[str, str] = {}  # what a line shows, whichever MPI
    for job in page["jobs"]:
        other = "" if job is page["jobs"][0] else f", {job['library'].rpartition(' ')[0]}"
        for row in job["rows"]:
            if row["verb"] == "all_reduce":
                point = log2(row["mib"]), row["share_of_limit"]
                lines.setdefault(row["what"] + other, []).append(point)
                whats[row["what"] + other] = row["what"]
    shades = svg.shades(list(dict.fromkeys(whats.values())))
    sizes = sorted({x for points in lines.values() for x, _ in points})
    highest = max(y for points in lines.values() for _, y in points)
    marks = [quarter / 4 for quarter in range(int(4 * max(1, highest)) + 2)]
    return svg.curves(
        f"All-reduce, {page['layout']}: share of the limit against size",
        lines,
        colors={name: shades[what] for name, what in whats.items()},
        dashed=[name for name, what in whats.items() if name != what],
        x_marks={size_of(2**x): x for x in sizes},
        y_marks={f"{y:.0%}": y for y in marks},
        mark=1.0,
    )


if __name__ == "__main__":
    sys.exit(main())
