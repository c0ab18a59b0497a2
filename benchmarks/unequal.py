"""Ranks of unequal speed: throughput with equal parts of each batch and with others.

    python benchmarks/unequal.py [--steps 120] [--rounds 3] [--batch-size 64] [--competitors 0 1 3]

Two ranks train the built-in task, each bound to a core; processes that compute on rank 1's core
slow it down. Jobs with `--balance.mode off` and `throughput` take turns. The ideal is the sum of
what both ranks compute in a second of their own time, in the jobs with equal parts of the same
round. Writes docs/results/unequal.md. Takes about 20 minutes, on two cores.
"""

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from emulated import trained
from results import DOCS, HERE, facts, heading, ratios, spread, table, write

MODES = ("off", "throughput")
WARM = 0.4  # of the steps of a job, in which shares may still change
EQUAL = "equal parts"
TASK = "mpirun -n 2 python -m mntrain --task unequal_task:UnequalTask --train.micro-batch-size 4"


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--competitors", nargs="+", type=int, default=[0, 1, 3])
    parser.add_argument("--suffix", help="of the page's name, for other competitors")
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed, one for each rank")
    page: dict[str, Any] = {**facts(), "torch": torch.__version__}
    page |= {"steps": options.steps, "batch_size": options.batch_size, "jobs": []}
    for number in range(options.rounds):
        for competitors in options.competitors:
            for mode in MODES if number % 2 else MODES[::-1]:
                job = train(mode, competitors, options)
                page["jobs"].append({"round": number, **job})
                print(f"round {number}: {competitors} competitors, {mode}", file=sys.stderr)
    publish(page, f"unequal-{options.suffix}" if options.suffix else "unequal", options.output)
    return 0


def train(mode: str, competitors: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps, and return the command and the samples per second."""
    command = f"{TASK} --train.steps {options.steps} --train.batch-size {options.batch_size}"
    command += f" --train.eval-every 0 --balance.mode {mode}"
    settings = {
        "COMPETITORS": f"1:{competitors}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE / 'ranks'}{os.pathsep}{HERE.parent}",
    }
    records, summary = trained(command, settings)
    seconds = [record["step_s"] for record in records]
    return {
        "command": command,
        "mode": mode,
        "competitors": competitors,
        "samples_per_s": options.batch_size / median(seconds[int(WARM * len(seconds)) :]),
        "own_samples_per_s": [rank["samples"] / rank["own_s"] for rank in summary["ranks"]],
        "shares": summary.get("shares", []),
        "step_s": seconds,
    }


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page."""
    about = (
        f"The built-in task with its default model of 0.9 M parameters, {page['batch_size']} "
        f"windows of 128 bytes a step, {page['steps']} steps, two ranks that are bound to one core "
        "each. Processes that compute compete for the core of rank 1. Samples per second are those "
        f"of the median step after the first {WARM:.0%}. The ideal is the sum of what each rank "
        "computes in a second of its own time, from the jobs with equal parts of the same round; "
        "its median is shown. Equal and balanced parts are shown as ratios to it: medians over "
        "rounds (least to most)."
    )
    head = ["processes that compete", "ideal, samples/s", EQUAL, "balanced"]
    head += ["balanced / equal parts", "samples of rank 1"]
    rows = []
    for competitors in dict.fromkeys(job["competitors"] for job in page["jobs"]):
        jobs = [job for job in page["jobs"] if job["competitors"] == competitors]
        equal, balanced = ([job for job in jobs if job["mode"] == mode] for mode in MODES)
        ideals = [sum(job["own_samples_per_s"]) for job in equal]
        speeds = [[job["samples_per_s"] for job in of_mode] for of_mode in (equal, balanced)]
        pairs = ((speeds[0], ideals), (speeds[1], ideals), (speeds[1], speeds[0]))
        half = {"samples": [page["batch_size"] // 2] * 2}
        parts = [[half, *job["shares"]][-1]["samples"][1] for job in balanced]
        cells = [f"{median(ideals):.1f}", *(spread(ratios(*pair)) for pair in pairs)]
        of_batch = f"{min(parts)} to {max(parts)} of {page['batch_size']}"
        rows.append([str(competitors), *cells, of_batch])
    lines = heading(page, "Ranks of unequal speed", {"torch": page["torch"]}, about)
    write(output, name, [*lines, *table(head, rows, texts=0)])


if __name__ == "__main__":
    sys.exit(main())
