"""Benchmark a training step of a GPT, in time and memory: every stage, torch's and DeepSpeed's.

    sudo python benchmarks/step.py [--layouts 2 2,2] [--link 1gbit] [--steps 3] [--turns 5]
    sudo python benchmarks/step.py --computing 1 2 4 --layouts 1,1 2,2 2

A layout is the number of ranks on each node. Nodes are network namespaces connected by links of the
given rate; a single node has no network. Every variant is a job of its own, so that its memory peak
is its own. In the job it alternates with as many ranks that only compute, and its step time is
given as a multiple of theirs, because the machine's speed differs between jobs. Prints tables, and
writes them to docs/results/. Takes about 25 minutes.

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

from emulated import HEAP, Layout, nodes
from results import DOCS, MIB, TIMES, facts, heading, ratios, table, write

BASELINES = ("compute only", "compute only, barriers")  # each rank trains alone
SEQUENCES = 4  # of a micro-batch, by default
STAGES = tuple(f"mntrain stage {stage}" for stage in (0, 1, 2))
# Parameters arrive during the next forward, as in a job of `python -m mntrain`.
OVERLAPPED = tuple(f"{stage}, overlap_forward" for stage in STAGES[1:])
WIRED = tuple(f"{stage}, bf16 wire" for stage in STAGES)  # with a network only
# For slow links, only on request: their losses differ.
SLOW = (
    "mntrain stage 0, int8",
    *(f"mntrain stage 0, {sync} every 20" for sync in ("local SGD", "DiLoCo", "SparseLoCo")),
    "mntrain stage 0, SparseLoCo (1/16) every 5",
)
SLOW_PEERS = ("DDP, bf16 hook", "DDP, PowerSGD hook")
BACKEND = (  # torch's own over the backend of mntrain.torch_backend, only on request
    *("DDP over mntrain", "DDP over mntrain, 4 MB buckets"),
    *("FSDP2 over mntrain, ZeRO-2", "FSDP2 over mntrain, ZeRO-3"),
)
PEERS = (
    *("DDP", "DDP, 4 MB buckets", "DDP, ZeroRedundancyOptimizer", "FSDP2, ZeRO-2", "FSDP2, ZeRO-3"),
    *(f"DeepSpeed stage {stage}" for stage in (0, 1, 2)),
)
VARIANTS = (*BASELINES, *STAGES, *OVERLAPPED, *WIRED, *PEERS)  # of a run without options
COMPARED = (BASELINES[0], *STAGES, *OVERLAPPED, "DDP", "DDP, 4 MB buckets")  # with `--computing`
CALIBRATION = 4, 12  # sequences of two micro-batches, whose seconds are interpolated
WIRED_LOSS = 5e-3  # by how much a 16-bit wire may change the loss after so few steps
COLUMNS = (TIMES, "min - max", "exposed, s", "CPU beyond compute, s", "vs. best peer", "step, s")
COLUMNS += ("sent per node, MB", "memory per node, MiB", "mean per rank, MiB")
MODEL = (
    "A GPT of {:.1f} M parameters (gradient {:.1f} MB) in fp32, AdamW, one thread per rank. All "
    "processes keep freed memory, as glibc does after a program has freed a block of 32 MiB "
    f"({', '.join(f'{name}={value}' for name, value in HEAP.items())})."
)
METHOD = (
    "The machine's speed differs between jobs, so in the job of each variant, its steps alternate "
    "with those of as many ranks that only compute: {turns} turns each, of {steps} steps after a "
    "warm-up step (variants that exchange rarely: of whole intervals). The first columns have the "
    "multiple of their time: the median over turns, least and most. *exposed* is what a step takes "
    "beyond compute only, and *CPU beyond compute* what all threads of a rank compute beyond it, "
    "the mean over ranks. The best peer is the fastest of the other libraries in the table."
)
ALONE = (
    " Micro-batches of {} sequences. *step* is the multiple of {:.3f} s, the median of compute "
    "only over all jobs. *memory* is the peak above that of the finished model, on the node with "
    "the highest sum; a page that k ranks share counts 1/k for each."
)


def main() -> int:
    """Measure every variant in every layout, and write pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layouts", nargs="+", default=["2", "2,2"], metavar="N,N")
    parser.add_argument("--link", default="1gbit", help="rate of each node's link, in gbit")
    parser.add_argument("--steps", type=int, default=3, help="per turn, after a warm-up step")
    parser.add_argument("--turns", type=int, default=5, help="of every variant")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="of a micro-batch")
    known = [*VARIANTS, *SLOW, *SLOW_PEERS, *BACKEND]
    parser.add_argument("--variants", nargs="+", choices=known, metavar="VARIANT")
    about = "of the time in which the gradients travel, instead of --sequences"
    parser.add_argument("--computing", nargs="+", type=float, metavar="MULTIPLE", help=about)
    parser.add_argument("--suffix", help="of the page's name, for a choice of variants")
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    options.variants = options.variants or (COMPARED if options.computing else VARIANTS)
    if options.sequences != SEQUENCES and any("DeepSpeed" in name for name in options.variants):
        parser.error(f"DeepSpeed has {SEQUENCES} sequences: give --variants without it")
    layouts = [Layout.of(text, options.link) for text in options.layouts]
    suffix = f"-{options.suffix}" if options.suffix else ""
    if options.computing:
        pages = [page for layout in layouts for page in measure_regimes(layout, options)]
        page = {key: pages[0][key] for key in ("command", "versions")} | {"regimes": pages}
        publish(page, f"step-regimes{suffix}", options.output)
        return 0
    for layout in layouts:
        page = measure(layout, options)
        rate = f"-{layout.link}" if layout.link not in (None, "1gbit") else ""
        publish(page, f"step-{layout.name}{rate}{suffix}", options.output)
    return 0


def measure_regimes(layout: Layout, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one layout with every multiple of `--computing`. Returns a page for each."""
    pages = []
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


def measure(layout: Layout, options: argparse.Namespace) -> dict[str, Any]:
    """Measure every variant in one layout. Returns all figures, one row per variant."""
    networked = (*WIRED, *SLOW, *SLOW_PEERS)
    before = facts()
    jobs: dict[str, dict[str, Any]] = {}
    sizes = ["--steps", options.steps, "--turns", options.turns, "--sequences", options.sequences]
    with nodes(layout) as running:
        for variant in (it for it in options.variants if layout.link or it not in networked):
            start = time.perf_counter()
            jobs[variant] = running.run("step.py", ["--what", variant, *sizes])
            seconds = time.perf_counter() - start
            print(f"{layout.name}: {variant}, {seconds:.1f} s", file=sys.stderr)
    losses = losses_of(jobs, (*STAGES, *OVERLAPPED, *PEERS))
    wired_losses = losses_of(jobs, WIRED)
    check_losses(losses)
    if losses:
        assert all(abs(loss - losses[0]) < WIRED_LOSS for loss in wired_losses), wired_losses
    first = next(iter(jobs.values()))
    alone = [seconds for job in jobs.values() for seconds in job.get("alone_s", ())]
    alone_s = statistics.median(alone)
    return {
        **before,
        "layout": str(layout),
        "versions": first["versions"],
        "steps": options.steps,
        "turns": options.turns,
        "sequences": options.sequences,
        "gradient_bytes": first["gradient_bytes"],
        "losses": losses,
        "wired_losses": wired_losses,
        "floor_s": travel_s(layout, first["gradient_bytes"]) if layout.bytes_per_s else None,
        "alone_s": alone_s,
        "rows": compared([row_of(name, job, layout) for name, job in jobs.items()], alone_s),
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
    turns = ratios(job["step_s"], job["alone_s"])
    cpu = zip(job["step_cpu_s"], job["alone_cpu_s"], strict=True)
    return {
        "what": variant,
        "ratio": statistics.median(turns),
        "ratios": (min(turns), max(turns)),
        "extra_cpu_s": statistics.median(own - alone for own, alone in cpu),
        **{key: job[key] for key in ("sent_bytes", "settings")},
        "node_peak_bytes": peak,
        "rank_peak_bytes": peak / ranks,
    }


def compared(rows: list[dict[str, Any]], alone_s: float) -> list[dict[str, Any]]:
    """Add to each row its step time scaled to the median of compute only, and vs. the best peer."""
    peers = [
        row["ratio"] for row in rows if row["what"] in (*PEERS, *SLOW_PEERS) and "ratio" in row
    ]
    for row in (row for row in rows if "ratio" in row):
        row["scaled_s"] = row["ratio"] * alone_s
        if row["what"] not in BASELINES and peers:
            row["to_best_peer"] = row["ratio"] / min(peers)
    return rows


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page of a layout, or of several regimes."""
    first, title = page.get("regimes", [page])[0], f"A training step, {page.get('layout')}"
    about = MODEL.format(first["gradient_bytes"] / 4e6, first["gradient_bytes"] / 1e6)
    if "regimes" in page:
        title = "A training step where computing takes longer than sending"
    lines = heading(first, title, first["versions"], about)
    lines.append(METHOD.format(**first))
    if "regimes" in page:
        for regime in page["regimes"]:
            title = f"## {regime['layout']}, {computing(regime)}"
            rows = [[row["what"], *cells(row)[:5]] for row in regime["rows"] if "ratio" in row]
            lines += ["", title, "", *table(["", *COLUMNS[:5]], rows)]
        write(output, name, lines)
        return
    lines[-1] += ALONE.format(page["sequences"], page["alone_s"])
    present = [row for row in page["rows"] if "ratio" in row]
    rows = [[row["what"], *cells(row)] for row in present]
    if page["floor_s"]:
        floor = ["", "", "", "", "", f"{page['floor_s']:.3f}", "", "", ""]
        rows.append(["fp32 all-reduce at line rate", *floor])
    lines += ["", agreement(page), "", *table(["", *COLUMNS], rows), ""]
    lines += [f"- {row['what']}: {row['settings']}." for row in present]
    absent = (row for row in page["rows"] if "absent" in row)
    lines += [f"- {row['what']} is not available: {row['absent']}." for row in absent]
    write(output, name, lines)


def cells(row: dict[str, Any]) -> list[str]:
    """Format the figures of a row, in the order of COLUMNS."""
    return [
        f"{row['ratio']:.3f}",
        "{:.2f} - {:.2f}".format(*row["ratios"]),
        f"{row['scaled_s'] * (1 - 1 / row['ratio']):.3f}",
        f"{row['extra_cpu_s']:.3f}",
        f"{row['to_best_peer']:.2f}" if "to_best_peer" in row else "",
        f"{row['scaled_s']:.3f}",
        f"{row['sent_bytes'] / 1e6:.1f}",
        *(f"{row[key] / MIB:.0f}" for key in ("node_peak_bytes", "rank_peak_bytes")),
    ]


def computing(page: dict[str, Any]) -> str:
    """Describe how long a step computes, beside the time in which its gradients travel."""
    text = (
        f"micro-batches of {page['sequences']} sequences: computing takes {page['alone_s']:.2f} s"
    )
    if page["floor_s"]:
        text += f", {page['alone_s'] / page['floor_s']:.1f} times the all-reduce at line rate"
    return text


def agreement(page: dict[str, Any]) -> str:
    """Describe how closely the losses of the variants agree."""
    losses, text = page["losses"], "Losses were not compared."
    if losses:
        text = f"All variants that communicate in fp32 end at a loss of {losses[0]:.4f} and differ "
        text += f"by at most {max(losses) - min(losses):.1g}."
    if losses and page["wired_losses"]:
        largest = max(abs(loss - losses[0]) for loss in page["wired_losses"])
        text += f" With the bf16 wire the loss differs by at most {largest:.1g}."
    return text


if __name__ == "__main__":
    sys.exit(main())
