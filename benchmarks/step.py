"""A training step of one GPT, in time and memory: every stage beside torch's and DeepSpeed's.

    sudo python benchmarks/step.py [--layouts 1 2 2,2] [--link 1gbit] [--steps 3] [--turns 5]

A layout is the ranks of each node: nodes are network namespaces joined by links of the given rate,
one node has no network. Every way to train is a job of its own, with a peak of memory of its own,
which then takes turns with as many ranks that only compute: a machine's speed changes from one job
to the next, and so a way's step is told as a multiple of computing alone in the same job. The
layout 1 is a world of one beside a bare torch loop, by turns in one job. At the end the built-in
task trains with every wire dtype, and their losses are put side by side (`--no-curves`: not).
Prints tables; writes them and every figure to docs/results/, and pictures to docs/img/. Takes about
25 minutes.
"""

import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import curves
import step_page
import values
from emulated import HERE, Layout, facts, folders, need_nodes, nodes, write

ALONE = "computing alone"
SOCKETS = "computing and bare sockets"
APART = (ALONE, "computing in step", SOCKETS)  # which learn alone
STAGES = tuple(f"mntrain stage {stage}" for stage in (0, 1, 2))
WIRED = tuple(f"{stage}, bf16 wire" for stage in STAGES)  # where there is a network
PEERS = (
    *("DDP", "DDP, 4 MB buckets", "DDP, ZeroRedundancyOptimizer"),
    *("FSDP2, ZeRO-2", "FSDP2, ZeRO-3"),
    *(f"DeepSpeed stage {stage}" for stage in (0, 1, 2)),
    "Horovod",
)
WIRED_LOSS = 5e-3  # what 16 bits on the wire may change in a loss after so few steps
WAYS = (*APART, *STAGES, *WIRED, *PEERS)


def main() -> int:
    """Measure every way in every layout, and write what came out."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument(
        "--layouts", nargs="*", type=values.layout, default=["1", "2", "2,2"], metavar="N,N"
    )
    options.add_argument(
        "--link", type=values.rate, default="1gbit", help="rate of each node's link, in gbit"
    )
    options.add_argument(
        "--steps", type=values.count, default=3, help="of a turn, after one that warms up"
    )
    options.add_argument("--turns", type=values.count, default=5, help="of every way")
    options.add_argument(
        "--solo-steps", type=values.count, default=40, help="the same of the layout 1"
    )
    options.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    options.add_argument("--curves", action=argparse.BooleanOptionalAction, default=True)
    options.add_argument("--curve-steps", type=values.count, default=120)
    options.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    given = options.parse_args()
    need_nodes()
    results, images = folders(given.output)
    pages = []
    for text in given.layouts:
        layout = Layout.of(text, given.link)
        if sum(layout.ranks) == 1:
            page = solo(layout, given)
            write(results, "step-1", page, step_page.solo_report(page))
            continue
        page = measure(layout, given)
        write(results, f"step-{layout.name}", page, step_page.report(page))
        pages.append(page)
    if pages:
        (images / "step.svg").write_text(step_page.picture(pages))
    if given.curves:
        page = curves.measure(given.curve_steps)
        write(results, "wire-dtype", page, curves.report(page))
        (images / "wire-dtype.svg").write_text(curves.picture(page))
    return 0


def solo(layout: Layout, given: argparse.Namespace) -> dict[str, Any]:
    """A world of one beside bare torch: a page of figures."""
    before = facts()
    with nodes(layout) as up:
        job = up.run("step.py", ["--solo", "--steps", given.solo_steps])
    check(job["ways"], [way["loss"] for way in job["ways"].values()])
    return {**before, "layout": str(layout), "steps": given.solo_steps, **job}


def measure(layout: Layout, given: argparse.Namespace) -> dict[str, Any]:
    """Every way in one layout: a page of figures, one row a way."""
    ways = [what for what in given.ways if layout.link or what not in (*WIRED, SOCKETS)]
    before = facts()
    jobs: dict[str, dict[str, Any]] = {}
    with nodes(layout) as up:
        for what in ways:
            start = time.perf_counter()
            sizes = ["--steps", given.steps, "--turns", given.turns]
            jobs[what] = up.run("step.py", ["--what", what, *sizes])
            print(f"{layout.name}: {what}, {time.perf_counter() - start:.1f} s", file=sys.stderr)
    found = losses(jobs, WIRED)
    wired = losses({what: jobs[what] for what in WIRED if what in jobs}, ())
    check(jobs, found)
    assert not found or all(abs(loss - found[0]) < WIRED_LOSS for loss in wired), (found, wired)
    any_job = jobs[ways[0]]
    page = {
        **before,
        "layout": str(layout),
        "versions": any_job["versions"],
        "steps": given.steps,
        "turns": given.turns,
        "gradient_bytes": any_job["gradient_bytes"],
        "losses": found,
        "wired_losses": wired,
        "floor_s": None,
        "alone_s": statistics.median(all_of(jobs, "alone_s")),
        "rows": [row_of(what, job, layout) for what, job in jobs.items()],
        "jobs": jobs,
    }
    if layout.bytes_per_s:
        count = len(layout.ranks)
        sent = 2 * (count - 1) / count * page["gradient_bytes"]
        page["floor_s"] = sent / layout.bytes_per_s
    compare(page["rows"], page["alone_s"])
    return page


def all_of(jobs: dict[str, dict[str, Any]], times: str) -> list[float]:
    """The times of all turns of all jobs."""
    return [taken for job in jobs.values() for taken in job.get(times, ())]


def check(jobs: dict[str, Any], found: list[float]) -> None:
    """A way that learns something else has no speed: losses agree to 4 decimals."""
    assert not found or max(found) - min(found) < 0.5e-4, (list(jobs), found)


def losses(jobs: dict[str, dict[str, Any]], without: tuple[str, ...]) -> list[float]:
    """The losses of every way that communicates, but some."""
    some = [job for what, job in jobs.items() if what not in (*APART, *without)]
    return [job["loss"] for job in some if "loss" in job]


def row_of(what: str, job: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """One way: medians of time over its turns, extremes of memory over the nodes."""
    if "absent" in job:
        return {"what": what, "absent": job["absent"]}
    by_node = per_node(job["peak_bytes"], layout)
    peak, ranks = max((sum(peaks), len(peaks)) for peaks in by_node)
    turns = [taken / bare for taken, bare in zip(job["step_s"], job["alone_s"], strict=True)]
    return {
        "what": what,
        "step_s": statistics.median(job["step_s"]),
        "alone_s": statistics.median(job["alone_s"]),
        "ratio": statistics.median(turns),
        "ratios": (min(turns), max(turns)),
        "waited_s": job["waited_s"],
        "busy_s": job["busy_s"],
        "sent_bytes": job["sent_bytes"],
        "node_peak_bytes": peak,
        "rank_peak_bytes": peak / ranks,
        "settings": job["settings"],
        "state": most_state(job["state"]),
    }


def per_node(by_rank: list[int], layout: Layout) -> list[list[int]]:
    """What ranks have, by node: world ranks fill the nodes in order."""
    starts = [sum(layout.ranks[:node]) for node in range(len(layout.ranks) + 1)]
    return [by_rank[low:high] for low, high in pairwise(starts)]


def compare(rows: list[dict[str, Any]], alone_s: float) -> None:
    """Add to each row its step where computing alone takes so long, and beside the best peer."""
    present = [row for row in rows if "absent" not in row]
    best = min((row["ratio"] for row in present if row["what"] in PEERS), default=None)
    for row in present:
        row["scaled_s"] = row["ratio"] * alone_s
        if row["what"] not in APART and best is not None:
            row["to_best_peer"] = row["ratio"] / best


def most_state(ranks: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """The state of the rank that holds most of it, totals added."""
    if ranks is None:
        return None
    most = max(ranks, key=lambda rank: sum(rank["measured"].values()))
    return {kind: sizes | {"total": sum(sizes.values())} for kind, sizes in most.items()}


if __name__ == "__main__":
    sys.exit(main())
