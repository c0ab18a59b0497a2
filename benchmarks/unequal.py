"""Ranks of unequal speed: throughput with equal parts of each batch and with others, and losses.

    python benchmarks/unequal.py [--steps 120] [--rounds 3] [--batch-size 64] [--competitors 0 1 3]
    python benchmarks/unequal.py --samples 3200 [--rounds 3]

Two ranks train the built-in task, each bound to a core; processes that compute on rank 1's core
slow it down. Jobs with `--balance.mode off` and `throughput` take turns. The ideal is the sum of
what both ranks compute in a second of their own time, in the jobs with equal parts of the same
round. Writes docs/results/unequal.md. Takes about 20 minutes.

With `--samples`, every way to divide the work trains until it has had so many, beside three such
processes, and a round is a seed: losses by samples and by time, in docs/results/cadence.md. Both
need two cores.
"""

import argparse
import os
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from emulated import trained
from results import DOCS, HERE, facts, heading, ratios, spread, table, write

MODES = ("off", "throughput")
WARM = 0.4  # of the steps of a job, in which shares may still change
EQUAL = "equal parts"
EVALUATIONS = 10
WAYS = {  # options, and the samples of a step, about
    EQUAL: ("--train.batch-size 8", 8),
    "balanced parts": ("--train.batch-size 8 --balance.mode throughput", 8),
    "balanced, parameters every 20 steps": (
        "--train.batch-size 8 --comm.ranks-per-node 1 --balance.mode throughput "
        "--sync.mode local-sgd --sync.every 20",
        8,
    ),
    "cadence, an anchor of at most 1": ("--balance.mode cadence --balance.max-anchor 1", 16),
    "cadence": ("--balance.mode cadence", 160),
}
TASK = "mpirun -n 2 python -m mntrain --task unequal_task:UnequalTask --train.micro-batch-size 4"
LOSSES = f"{TASK} --train.eval-samples 64 --optim.schedule constant --optim.warmup-steps 5"


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--competitors", nargs="+", type=int, default=[0, 1, 3])
    parser.add_argument("--samples", type=int, help="of a run: measure losses instead")
    parser.add_argument("--suffix", help="of the page's name, for other competitors")
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed, one for each rank")
    page: dict[str, Any] = {**facts(), "torch": torch.__version__}
    if options.samples:
        page |= {"samples": options.samples, "runs": {way: {} for way in WAYS}}
        for seed in range(options.rounds):
            for way, runs in page["runs"].items():
                runs[str(seed)] = train_to(way, seed, options.samples)
                print(f"seed {seed}, {way}: {runs[str(seed)]['points'][-1]}", file=sys.stderr)
        publish_losses(page, "cadence", options.output)
        return 0
    page |= {"steps": options.steps, "batch_size": options.batch_size, "jobs": []}
    for number in range(options.rounds):
        for competitors in options.competitors:
            for mode in MODES if number % 2 else MODES[::-1]:
                job = train(mode, competitors, options)
                page["jobs"].append({"round": number, **job})
                print(f"round {number}: {competitors} competitors, {mode}", file=sys.stderr)
    publish(page, f"unequal-{options.suffix}" if options.suffix else "unequal", options.output)
    return 0


def run(command: str, competitors: int, **more: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train once beside so many processes; return the metrics of the steps and the summary."""
    settings = {
        "COMPETITORS": f"1:{competitors}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE / 'ranks'}{os.pathsep}{HERE.parent}",
    }
    return trained(command, settings | more)


def train(mode: str, competitors: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps, and return the command and the samples per second."""
    command = f"{TASK} --train.steps {options.steps} --train.batch-size {options.batch_size}"
    command += f" --train.eval-every 0 --balance.mode {mode}"
    records, summary = run(command, competitors)
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


def train_to(way: str, seed: int, samples: int) -> dict[str, Any]:
    """Train on so many samples; return (samples, seconds, validation loss) by evaluation."""
    words, of_step = WAYS[way]
    every = max(1, round(samples / of_step / EVALUATIONS))
    most = 2 * samples // 8  # steps: more than any takes, since the task ends the run
    command = f"{LOSSES} --run.seed {seed} --train.steps {most} --train.eval-every {every} {words}"
    records, _ = run(command, 3, SAMPLES=str(samples))
    seen = list(accumulate(record["samples"] for record in records))
    seconds = list(accumulate(record["step_s"] for record in records))
    points = [
        (count, passed_s, record["eval_loss"])
        for count, passed_s, record in zip(seen, seconds, records, strict=True)
        if "eval_loss" in record
    ]
    totals = {"steps": len(records), "samples": seen[-1], "seconds": seconds[-1]}
    return {"command": command, **totals, "points": points}


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page of throughput."""
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


def publish_losses(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page of losses."""
    about = (
        "The built-in task with its default model of 0.9 M parameters on windows of 128 bytes, two "
        "ranks that are bound to one core each; 3 processes that compute share the core of rank 1. "
        f"Every run ends after about {page['samples']:,} windows, with the same learning rate in "
        "each step. The loss is over 64 validation windows, in nats per byte; means, minima and "
        "maxima are over seeds. Seconds are those of steps, without evaluations."
    )
    head = ["division", "steps", "samples per s", "seconds", "loss at the end", "min - max"]
    rows = []
    for way, made in page["runs"].items():
        runs = list(made.values())
        losses = [run["points"][-1][2] for run in runs]
        seconds = median(run["points"][-1][1] for run in runs)  # of the last evaluation
        then = mean(loss_at(run["points"], seconds) for run in page["runs"][EQUAL].values())
        cells = [
            f"{median(run['steps'] for run in runs):.0f}",
            f"{median(run['samples'] / run['seconds'] for run in runs):.1f}",
            f"{seconds:.0f}",
            f"{mean(losses):.3f}",
            f"{min(losses):.3f} - {max(losses):.3f}",
        ]
        rows.append([way, *cells, "" if way == EQUAL else f"{then:.3f}"])
    commands = (next(iter(runs.values()))["command"] for runs in page["runs"].values())
    lines = heading(page, "Losses on ranks of unequal speed", {"torch": page["torch"]}, about)
    lines += ["It runs, for each seed:", "", *(f"    {command}" for command in commands), ""]
    write(output, name, [*lines, *table([*head, "loss of equal parts by then"], rows)])


def loss_at(points: list[tuple[float, float, float]], seconds: float) -> float:
    """Return the loss of a run after so many seconds; behind its end, the last one."""
    for (_, start, before), (_, end, after) in pairwise(points):
        if start <= seconds <= end:
            return before + (after - before) * (seconds - start) / (end - start)
    return points[-1][2]


if __name__ == "__main__":
    sys.exit(main())
