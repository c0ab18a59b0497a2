"""Benchmark a training step of a GPT, in time and memory: every stage, torch's and DeepSpeed's.

    sudo python benchmarks/step.py [--layouts 1 2 2,2] [--link 1gbit] [--steps 3] [--turns 5]
    sudo python benchmarks/step.py --computing 1 2 4 --layouts 1,1 2,2 2

A layout is the number of ranks on each node. Nodes are network namespaces connected by links of the
given rate; a single node has no network. Every variant is a job of its own, so that its memory peak
is its own. In the job it alternates with as many ranks that only compute, and its step time is
given as a multiple of theirs, because the machine's speed differs between jobs. Layout 1 compares a
single process with a plain torch loop, in turns in one job. At the end the built-in task trains
with each wire dtype, and their losses are compared (`--no-curves` skips this). Prints tables,
writes them and all figures to docs/results/, and plots to docs/img/. Takes about 25 minutes.

With `--computing`, micro-batches are so large that a step computes for about so many times the
seconds in which its gradients travel at the rate of the link; on one node, where nothing says how
large, they are so many times the usual size. One page compares the library's stages with DDP in all
of these, and has the CPU seconds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import loss_curves
import option_types
import step_page
from emulated import HERE, Layout, facts, need_nodes, nodes

SOCKETS = "compute, raw sockets"
BASELINES = ("compute only", "compute only, barriers", SOCKETS)  # each rank trains alone
SEQUENCES = 4  # of a micro-batch, by default
STAGES = tuple(f"mntrain stage {stage}" for stage in (0, 1, 2))
# Parameters arrive during the next forward, as in a job of `python -m mntrain`.
OVERLAPPED = tuple(f"{stage}, overlap_forward" for stage in STAGES[1:])
WIRED = tuple(f"{stage}, bf16 wire" for stage in STAGES)  # with a network only
# For slow links, only on request: their losses differ. EVERY of ranks/variants.py is in the names.
SLOW = (
    "mntrain stage 0, int8",
    *(f"mntrain stage 0, {sync} every 20" for sync in ("local SGD", "DiLoCo")),
    "mntrain stage 0, SparseLoCo every 20",
    "mntrain stage 0, SparseLoCo (1/16) every 5",
)
SLOW_PEERS = ("DDP, bf16 hook", "DDP, PowerSGD hook", "PostLocalSGD every 20")
BACKEND = (  # torch's own over the backend of mntrain.torch_backend, only on request
    *("DDP over mntrain", "DDP over mntrain, 4 MB buckets"),
    *("FSDP2 over mntrain, ZeRO-2", "FSDP2 over mntrain, ZeRO-3"),
)
PEERS = (
    *("DDP", "DDP, 4 MB buckets", "DDP, ZeroRedundancyOptimizer"),
    *("FSDP2, ZeRO-2", "FSDP2, ZeRO-3"),
    *(f"DeepSpeed stage {stage}" for stage in (0, 1, 2)),
    "Horovod",
)
VARIANTS = (*BASELINES, *STAGES, *OVERLAPPED, *WIRED, *PEERS)  # of a run without options
COMPARED = (BASELINES[0], *STAGES, *OVERLAPPED, "DDP", "DDP, 4 MB buckets")  # with `--computing`
CALIBRATION = 4, 12  # sequences of two micro-batches, whose seconds are interpolated
WIRED_LOSS = 5e-3  # by how much a 16-bit wire may change the loss after so few steps


def main() -> int:
    """Measure every variant in every layout, and write pages and plots."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    count = option_types.count
    parser.add_argument(
        "--layouts", nargs="*", type=option_types.layout, default=["1", "2", "2,2"], metavar="N,N"
    )
    parser.add_argument(
        "--link", type=option_types.rate, default="1gbit", help="rate of each node's link, in gbit"
    )
    parser.add_argument("--steps", type=count, default=3, help="per turn, after a warm-up step")
    parser.add_argument("--turns", type=count, default=5, help="of every variant")
    parser.add_argument("--sequences", type=count, default=SEQUENCES, help="of a micro-batch")
    parser.add_argument("--solo-steps", type=count, default=40, help="steps in layout 1")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=[*VARIANTS, *SLOW, *SLOW_PEERS, *BACKEND],
        metavar="VARIANT",
    )
    parser.add_argument(
        "--computing",
        nargs="+",
        type=option_types.positive,
        metavar="MULTIPLE",
        help="of the time in which the gradients travel, instead of --sequences",
    )
    parser.add_argument("--note", help="what a reader of the page has to know of this measurement")
    parser.add_argument("--suffix", help="of the page's name, for a choice of variants")
    parser.add_argument("--curves", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--curve-steps", type=count, default=120)
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    options = parser.parse_args()
    options.variants = options.variants or (COMPARED if options.computing else VARIANTS)
    if options.sequences != SEQUENCES and any("DeepSpeed" in name for name in options.variants):
        parser.error(
            f"DeepSpeed's variants have {SEQUENCES} sequences: give --variants without them"
        )
    need_nodes()
    if options.computing:
        pages = [page for text in options.layouts for page in measure_regimes(text, options)]
        together = {key: pages[0][key] for key in ("command", "versions")} | {"regimes": pages}
        step_page.publish(together, f"step-regimes{suffix_of(options)}", options.output)
        return 0
    for text in options.layouts:
        layout = Layout.of(text, options.link)
        if sum(layout.ranks) == 1:
            page = measure_solo(layout, options.solo_steps)
        else:
            page = measure(layout, options)
        if options.note:
            page["note"] = options.note
        rate = f"-{layout.link}" if layout.link not in (None, "1gbit") else ""
        name = f"step-{layout.name}{rate}{suffix_of(options)}"
        step_page.publish(page, name, options.output)
    if options.curves:
        page = loss_curves.measure(options.curve_steps)
        loss_curves.publish(page, "wire-dtype", options.output)
    return 0


def suffix_of(options: argparse.Namespace) -> str:
    """Return the end of a page's name."""
    return f"-{options.suffix}" if options.suffix else ""


def measure_regimes(text: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one layout with every multiple of `--computing`. Returns a page for each."""
    layout, pages = Layout.of(text, options.link), []
    for multiple in options.computing:
        options.sequences = round(multiple * SEQUENCES)
        if layout.bytes_per_s:
            options.sequences = sequences_for(layout, multiple)
        pages.append({"multiple": multiple, **measure(layout, options)})
    return pages


def sequences_for(layout: Layout, multiple: float) -> int:
    """Return for how many sequences a step computes so many times as long as gradients travel."""
    seconds = []
    with nodes(layout) as running:
        for count in CALIBRATION:
            job = running.run("step.py", ["--what", BASELINES[0], "--sequences", count])
            seconds.append(statistics.median(job["alone_s"]))
    fewest, most = CALIBRATION
    each_s = (seconds[1] - seconds[0]) / (most - fewest)
    wanted_s = multiple * travel_s(layout, job["gradient_bytes"])
    return max(1, round(fewest + (wanted_s - seconds[0]) / each_s))


def travel_s(layout: Layout, nbytes: int) -> float:
    """Return the seconds of an fp32 all-reduce between nodes at the rate of the link."""
    count = len(layout.ranks)
    assert layout.bytes_per_s, "one node has no link"
    return 2 * (count - 1) / count * nbytes / layout.bytes_per_s


def measure_solo(layout: Layout, steps: int) -> dict[str, Any]:
    """Compare a single process with a plain torch loop."""
    before = facts()
    with nodes(layout) as running:
        job = running.run("step.py", ["--solo", "--steps", steps])
    check_losses([way["loss"] for way in job["ways"].values()])
    return {**before, "layout": str(layout), "steps": steps, **job}


def measure(layout: Layout, options: argparse.Namespace) -> dict[str, Any]:
    """Measure every variant in one layout. Returns all figures, one row per variant."""
    networked = (*WIRED, *SLOW, *SLOW_PEERS, SOCKETS)
    variants = [it for it in options.variants if layout.link or it not in networked]
    before = facts()
    jobs: dict[str, dict[str, Any]] = {}
    with nodes(layout) as running:
        for variant in variants:
            start = time.perf_counter()
            arguments = ["--what", variant, "--steps", options.steps, "--turns", options.turns]
            arguments += ["--sequences", options.sequences]
            jobs[variant] = running.run("step.py", arguments)
            seconds = time.perf_counter() - start
            print(f"{layout.name}: {variant}, {seconds:.1f} s", file=sys.stderr)
    losses = losses_of(jobs, (*STAGES, *OVERLAPPED, *PEERS))
    wired_losses = losses_of(jobs, WIRED)
    check_losses(losses)
    if losses:
        assert all(abs(loss - losses[0]) < WIRED_LOSS for loss in wired_losses), wired_losses
    alone_s = statistics.median(
        seconds for job in jobs.values() for seconds in job.get("alone_s", ())
    )
    rows = [row_of(variant, job, layout) for variant, job in jobs.items()]
    add_comparisons(rows, alone_s)
    gradient_bytes = jobs[variants[0]]["gradient_bytes"]
    floor_s = travel_s(layout, gradient_bytes) if layout.bytes_per_s else None
    return {
        **before,
        "layout": str(layout),
        "versions": jobs[variants[0]]["versions"],
        "steps": options.steps,
        "turns": options.turns,
        "sequences": options.sequences,
        "gradient_bytes": gradient_bytes,
        "losses": losses,
        "wired_losses": wired_losses,
        "floor_s": floor_s,
        "alone_s": alone_s,
        "rows": rows,
        "jobs": jobs,
    }


def check_losses(losses: list[float]) -> None:
    """Check that all losses agree to 4 decimals: a variant that learns less has no valid time."""
    assert not losses or max(losses) - min(losses) < 0.5e-4, losses


def losses_of(jobs: dict[str, dict[str, Any]], variants: Iterable[str]) -> list[float]:
    """Return the losses of the variants that have run."""
    return [jobs[name]["loss"] for name in variants if "loss" in jobs.get(name, ())]


def row_of(variant: str, job: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Summarize a variant: the median time over its turns, the highest memory of a node."""
    if "absent" in job:
        return {"what": variant, "absent": job["absent"]}
    ends = [sum(layout.ranks[:node]) for node in range(len(layout.ranks) + 1)]
    by_node = [job["peak_bytes"][low:high] for low, high in pairwise(ends)]
    peak, ranks = max((sum(peaks), len(peaks)) for peaks in by_node)
    turns = [step / alone for step, alone in zip(job["step_s"], job["alone_s"], strict=True)]
    return {
        "what": variant,
        "step_s": statistics.median(job["step_s"]),
        "alone_s": statistics.median(job["alone_s"]),
        "ratio": statistics.median(turns),
        "ratios": (min(turns), max(turns)),
        "extra_cpu_s": statistics.median(
            own - alone for own, alone in zip(job["step_cpu_s"], job["alone_cpu_s"], strict=True)
        ),
        "waited_s": job["waited_s"],
        "busy_s": job["busy_s"],
        "sent_bytes": job["sent_bytes"],
        "node_peak_bytes": peak,
        "rank_peak_bytes": peak / ranks,
        "settings": job["settings"],
        "state": largest_state(job["state"]),
    }


def add_comparisons(rows: list[dict[str, Any]], alone_s: float) -> None:
    """Add to each row its step time scaled to the median of compute only, and vs. the best peer."""
    present = [row for row in rows if "absent" not in row]
    best = min(
        (row["ratio"] for row in present if row["what"] in (*PEERS, *SLOW_PEERS)), default=None
    )
    for row in present:
        row["scaled_s"] = row["ratio"] * alone_s
        if row["what"] not in BASELINES and best is not None:
            row["to_best_peer"] = row["ratio"] / best


def largest_state(ranks: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Return the model state, with totals, of the rank that holds most."""
    if ranks is None:
        return None
    largest = max(ranks, key=lambda rank: sum(rank["measured"].values()))
    return {kind: sizes | {"total": sum(sizes.values())} for kind, sizes in largest.items()}


if __name__ == "__main__":
    sys.exit(main())
