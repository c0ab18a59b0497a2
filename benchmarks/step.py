"""A training step of one GPT, in time and memory: every stage beside torch's and DeepSpeed's.

    sudo python benchmarks/step.py [--layouts 1 2 2,2] [--link 1gbit] [--steps 8] [--rounds 2]

A layout is the ranks of each node: nodes are network namespaces joined by links of the given rate,
one node has no network. Every way to train is a job of its own, with a peak of memory of its own;
the whole list runs `--rounds` times, so that noise falls on all alike. The layout 1 is a world of
one beside a bare torch loop, by turns in one job. At the end the built-in task trains with every
wire dtype, and their losses are put side by side (`--no-curves`: not). Prints tables; writes them
and every figure to docs/results/, and pictures to docs/img/. Takes about 18 minutes.
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
from emulated import HERE, Layout, Nodes, facts, folders, need_nodes, nodes, write

ALONE = "computing alone"
STAGES = tuple(f"mntrain stage {stage}" for stage in (0, 1, 2))
WIRED = tuple(f"{stage}, bf16 wire" for stage in STAGES)  # where there is a network
PEERS = (
    *("DDP", "DDP, 4 MB buckets", "DDP, ZeroRedundancyOptimizer"),
    *("FSDP2, ZeRO-2", "FSDP2, ZeRO-3"),
    *(f"DeepSpeed stage {stage}" for stage in (0, 1, 2)),
    "Horovod",
)
WIRED_LOSS = 5e-3  # what 16 bits on the wire may change in a loss after so few steps
WAYS = (ALONE, *STAGES, *WIRED, *PEERS)


def main() -> int:
    """Measure every way in every layout, and write what came out."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--layouts", nargs="*", default=["1", "2", "2,2"], metavar="N,N")
    options.add_argument("--link", default="1gbit", help="rate of each node's link, in gbit")
    options.add_argument("--steps", type=int, default=8, help="measured, after 2 that warm up")
    options.add_argument("--solo-steps", type=int, default=40, help="the same of the layout 1")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    options.add_argument("--curves", action=argparse.BooleanOptionalAction, default=True)
    options.add_argument("--curve-steps", type=int, default=120)
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
    ways = [what for what in given.ways if layout.link or what not in WIRED]
    before = facts()
    jobs: dict[str, list[dict[str, Any]]] = {what: [] for what in ways}
    with nodes(layout) as up:
        for number in range(given.rounds):
            for what in ways:
                if not (jobs[what] and "absent" in jobs[what][0]):
                    start = time.perf_counter()
                    jobs[what].append(job(up, what, given.steps))
                    took = f"{time.perf_counter() - start:.1f} s"
                    print(f"{layout.name} round {number + 1}: {what}, {took}", file=sys.stderr)
    found = losses(jobs, WIRED)
    wired = losses({what: jobs[what] for what in WIRED if what in jobs}, ())
    check(jobs, found)
    assert not found or all(abs(loss - found[0]) < WIRED_LOSS for loss in wired), (found, wired)
    any_job = jobs[ways[0]][0]
    page = {
        **before,
        "layout": str(layout),
        "versions": any_job["versions"],
        "steps": given.steps,
        "rounds": given.rounds,
        "gradient_bytes": any_job["gradient_bytes"],
        "losses": found,
        "wired_losses": wired,
        "floor_s": None,
        "rows": [row_of(what, runs, layout) for what, runs in jobs.items()],
        "jobs": jobs,
    }
    if layout.bytes_per_s:
        count = len(layout.ranks)
        sent = 2 * (count - 1) / count * page["gradient_bytes"]
        page["floor_s"] = sent / layout.bytes_per_s
    compare(page["rows"])
    return page


def job(up: Nodes, what: str, steps: int) -> dict[str, Any]:
    """Run one way: what its ranks report."""
    return up.run("step.py", ["--what", what, "--steps", steps])


def check(jobs: dict[str, Any], found: list[float]) -> None:
    """A way that learns something else has no speed: losses agree to 4 decimals."""
    assert not found or max(found) - min(found) < 0.5e-4, (list(jobs), found)


def losses(jobs: dict[str, list[dict[str, Any]]], without: tuple[str, ...]) -> list[float]:
    """The final losses of every way that communicates, but some."""
    runs = [run for what, some in jobs.items() if what not in (ALONE, *without) for run in some]
    return [run["loss"] for run in runs if "loss" in run]


def row_of(what: str, runs: list[dict[str, Any]], layout: Layout) -> dict[str, Any]:
    """One way over all rounds: medians of time, extremes of memory."""
    if "absent" in runs[0]:
        return {"what": what, "absent": runs[0]["absent"]}
    by_node = [peaks for run in runs for peaks in per_node(run["peak_bytes"], layout)]
    peak, ranks = max((sum(peaks), len(peaks)) for peaks in by_node)
    clocks = {
        clock: statistics.median(run[clock] for run in runs) if runs[0][clock] is not None else None
        for clock in ("waited_s", "busy_s")
    }
    return {
        "what": what,
        "step_s": statistics.median(statistics.median(run["step_s"]) for run in runs),
        **clocks,
        "sent_bytes": statistics.median(run["sent_bytes"] for run in runs),
        "node_peak_bytes": peak,
        "rank_peak_bytes": peak / ranks,
        "settings": runs[0]["settings"],
        "state": most_state(runs[0]["state"]),
    }


def per_node(by_rank: list[int], layout: Layout) -> list[list[int]]:
    """What ranks have, by node: world ranks fill the nodes in order."""
    starts = [sum(layout.ranks[:node]) for node in range(len(layout.ranks) + 1)]
    return [by_rank[low:high] for low, high in pairwise(starts)]


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row what it takes beyond computing alone, and beside the best peer."""
    present = [row for row in rows if "absent" not in row]
    alone = next((row["step_s"] for row in present if row["what"] == ALONE), None)
    best = min((row["step_s"] for row in present if row["what"] in PEERS), default=None)
    for row in present:
        if row["what"] != ALONE and alone is not None:
            row["exposed_s"] = row["step_s"] - alone
            row["exposed_share"] = row["exposed_s"] / alone
        if row["what"] != ALONE and best is not None:
            row["to_best_peer"] = row["step_s"] / best


def most_state(ranks: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """The state of the rank that holds most of it, totals added."""
    if ranks is None:
        return None
    most = max(ranks, key=lambda rank: sum(rank["measured"].values()))
    return {kind: sizes | {"total": sum(sizes.values())} for kind, sizes in most.items()}


if __name__ == "__main__":
    sys.exit(main())
