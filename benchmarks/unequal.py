"""Throughput of ranks of unequal speed, with equal parts of each batch and with balanced ones.

    python benchmarks/unequal.py [--steps 120] [--rounds 3] [--batch-size 64] [--competitors 0 1 3]

Two ranks train the built-in task, each bound to a core; processes that compute on rank 1's core
slow it down. Jobs with `--balance.mode off` and `throughput` take turns. The ideal is the sum of
what both ranks compute in a second of their own time, in the jobs with equal parts of the same
round. Without a suffix, a last job is slowed in its middle only, and its parts are plotted. Needs
two cores. Writes docs/results/unequal.md and its figures, and docs/img/unequal.svg. Takes about 20
minutes.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import figures
import option_types
import torch
from emulated import HERE, facts, folders, heading, here, output_of, table, write

COMPETITORS = (0, 1, 3)
MODES = ("off", "throughput")
LIMIT_S = 1800  # for one job
WARM = 0.4  # of the steps of a job, in which shares may still change


def main() -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=option_types.count, default=120)
    parser.add_argument("--rounds", type=option_types.count, default=3)
    parser.add_argument("--batch-size", type=option_types.count, default=64)
    parser.add_argument(
        "--competitors", nargs="+", type=int, choices=COMPETITORS, default=COMPETITORS
    )
    parser.add_argument("--suffix", help="of the page's name, for other competitors")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    parser.add_argument("--note", help="what a reader of the page has to know of this measurement")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed, one for each rank")
    page: dict[str, Any] = {**facts(), "torch": torch.__version__, "jobs": []}
    page |= {"steps": options.steps, "batch_size": options.batch_size}
    if options.note:
        page["note"] = options.note
    for number in range(options.rounds):
        for competitors in options.competitors:
            for mode in MODES if number % 2 else MODES[::-1]:
                job = train(mode, competitors, (2, options.steps), options.steps, options)
                page["jobs"].append({"round": number, **job})
                print(f"round {number}: {competitors} competitors, {mode}", file=sys.stderr)
    if options.suffix:
        publish(page, f"unequal-{options.suffix}", options.output)
        return 0
    middle = options.steps // 2, 3 * options.steps // 2
    page["release"] = train("throughput", 1, middle, 5 * options.steps // 2, options)
    page["release"]["slowed"] = middle
    publish(page, "unequal", options.output)
    return 0


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page `name` and its image."""
    results, images = folders(output)
    write(results, name, page, report(page))
    if "release" in page:
        plot(page["release"], images / f"{name}.svg")


def train(
    mode: str, competitors: int, slowed: tuple[int, int], steps: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Train once, and return the command and what ranks have done; steps `slowed` are slow."""
    words = {
        "task": "unequal_task:UnequalTask",
        "train.steps": steps,
        "train.batch-size": options.batch_size,
        "train.micro-batch-size": 4,
        "train.eval-every": 0,
        "balance.mode": mode,
    }
    command = "mpirun -n 2 python -m mntrain " + " ".join(f"--{n} {v}" for n, v in words.items())
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        env = here() | settings(competitors, *slowed)
        output_of([*shlex.split(command), "--run.dir", str(run)], env, LIMIT_S)
        records, summary = read(run)
    seconds = [record["step_s"] for record in records]
    return {
        "command": command,
        "mode": mode,
        "competitors": competitors,
        "batch_size": options.batch_size,
        "samples_per_s": options.batch_size / median(seconds[int(WARM * len(seconds)) :]),
        "own_samples_per_s": [rank["samples"] / rank["own_s"] for rank in summary["ranks"]],
        "shares": summary.get("shares", []),
        "step_s": seconds,
    }


def settings(competitors: int, first: int, last: int) -> dict[str, str]:
    """Return the environment of a job in which so many processes slow rank 1 in some steps."""
    return {
        "COMPETITORS": f"1:{competitors}:{first}:{last}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE / 'ranks'}{os.pathsep}{HERE.parent}",
    }


def read(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the metrics of the steps of a run, and its summary."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], json.loads((run / "summary.json").read_text())


def report(page: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    about = (
        f"The built-in task with its default model of 0.9 M parameters, {page['batch_size']} "
        "windows of 128 bytes a step, "
        f"{page['steps']} steps, two ranks that are bound to one core each. Processes that compute "
        "compete for the core of rank 1. Samples per second are those of the median step after the "
        f"first {WARM:.0%}. The ideal is the sum of what each rank computes in a second of its own "
        "time, from the jobs with equal parts of the same round; its median is shown. Equal and "
        "balanced parts are shown as ratios to it, and in the fifth column balanced parts to equal "
        "ones: medians over rounds (least to most)."
    )
    head = ["processes that compete", "ideal, samples/s", "equal parts", "balanced"]
    head += ["balanced / equal parts", "samples of rank 1"]
    rows = []
    for competitors in COMPETITORS:
        jobs = [job for job in page["jobs"] if job["competitors"] == competitors]
        if not jobs:
            continue
        by_mode = {mode: [j for j in jobs if j["mode"] == mode] for mode in MODES}
        by_mode = {mode: sorted(js, key=lambda job: job["round"]) for mode, js in by_mode.items()}
        ideals = [sum(job["own_samples_per_s"]) for job in by_mode["off"]]
        speeds = {mode: [job["samples_per_s"] for job in by_mode[mode]] for mode in MODES}
        cells = [
            ratio(speeds["off"], ideals),
            ratio(speeds["throughput"], ideals),
            ratio(speeds["throughput"], speeds["off"]),
        ]
        parts = [last_part(job, page["batch_size"]) for job in by_mode["throughput"]]
        of_batch = f"{min(parts)} to {max(parts)} of {page['batch_size']}"
        rows.append([str(competitors), f"{median(ideals):.1f}", *cells, of_batch])
    first = heading(page, "Ranks of unequal speed", {"torch": page["torch"]}, about)
    lines = [*first, *table(head, rows, texts=0)]
    if "note" in page:
        lines += ["", page["note"]]
    if "release" in page:
        first, last = page["release"]["slowed"]
        lines += [
            "",
            f"A job whose rank 1 is slowed by one process in steps {first} to {last}:",
            "",
            "![samples of each rank by step](../img/unequal.svg)",
        ]
    return "\n".join(lines) + "\n"


def ratio(values: Sequence[float], bases: Sequence[float]) -> str:
    """Return the median of the ratios of values of the same rounds, with their range."""
    ratios = [value / base for value, base in zip(values, bases, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def last_part(job: dict[str, Any], batch_size: int) -> int:
    """Return the samples of rank 1 in the latest plan of a job."""
    plans = job["shares"]
    return int(plans[-1]["samples"][1]) if plans else batch_size // 2


def plot(job: dict[str, Any], path: Path) -> None:
    """Plot the samples of both ranks by step."""
    steps = len(job["step_s"])
    plans = [{"step": 1, "samples": [job["batch_size"] // 2] * 2}, *job["shares"]]
    lines = {}
    for rank in range(2):
        points = []
        for plan, following in zip(plans, [*plans[1:], {"step": steps}], strict=True):
            samples = plan["samples"][rank]
            points += [(plan["step"], samples), (following["step"], samples)]
        lines[f"rank {rank}"] = points
    first, last = job["slowed"]
    figures.line_chart(
        path,
        f"Samples of each rank; rank 1 is slowed from step {first} to {last}",
        lines,
        colors=dict(zip(lines, figures.OURS, strict=False)),
        x_label="step",
        y_label="samples of a step",
    )


if __name__ == "__main__":
    sys.exit(main())
