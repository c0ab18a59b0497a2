"""Losses on ranks of unequal speed, by samples and by time: parts, a cadence, parameters' means.

    python benchmarks/unequal_losses.py [--samples 3200] [--seeds 3]

Two ranks train the built-in task, each bound to a core; three processes that compute on rank 1's
core leave it a quarter. The ways to divide the work take turns, each from the same weights for a
seed, until they have trained on so many samples. Each result is saved as it comes: the same command
again goes on where it stopped. Writes docs/results/cadence.md, its figures and plots. Needs two
cores. Takes about 20 minutes.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import figures
import option_types
import torch
from emulated import HERE, facts, folders, heading, here, output_of, table, write

COMPETITORS = 3
EVALUATIONS = 10
LIMIT_S = 1800  # for one job
EQUAL = "equal parts"


class Way(NamedTuple):
    """A way to divide the work."""

    options: str
    samples: int  # of a step, about


WAYS = {
    EQUAL: Way("--train.batch-size 8", 8),
    "balanced parts": Way("--train.batch-size 8 --balance.mode throughput", 8),
    "balanced, parameters every 20 steps": Way(
        "--train.batch-size 8 --comm.ranks-per-node 1 --balance.mode throughput "
        "--sync.mode local-sgd --sync.every 20",
        8,
    ),
    "cadence, an anchor of at most 1": Way("--balance.mode cadence --balance.max-anchor 1", 16),
    "cadence": Way("--balance.mode cadence", 160),
}
SHARED = (
    "mpirun -n 2 python -m mntrain --task unequal_task:UnequalTask --train.micro-batch-size 4 "
    "--train.eval-samples 64 --optim.schedule constant --optim.warmup-steps 5"
)


def main() -> int:
    """Train in every way with every seed, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=option_types.count, default=3200)
    parser.add_argument("--seeds", type=option_types.count, default=3)
    parser.add_argument("--note", help="what a reader of the page has to know of this measurement")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed, one for each rank")
    path = folders(options.output)[0] / "cadence.json"
    page: dict[str, Any] = {**facts(), "torch": torch.__version__, "runs": {}}
    if path.exists():
        page = json.loads(path.read_text())
    page["samples"] = options.samples
    if options.note:
        page["note"] = options.note
    for seed in range(options.seeds):  # ways take turns, so that the machine's hours are shared
        for name in WAYS:
            runs = page["runs"].setdefault(name, {})
            if runs.get(str(seed), {}).get("command") != command_of(name, seed, options.samples):
                runs[str(seed)] = train(name, seed, options.samples)
                path.write_text(json.dumps(page, indent=1) + "\n")
                loss = runs[str(seed)]["points"][-1][2]
                print(f"seed {seed}, {name}: {loss:.4f}", file=sys.stderr, flush=True)
    publish(page, "cadence", options.output)
    return 0


def command_of(name: str, seed: int, samples: int) -> str:
    """Return the command of a run, without its directory."""
    way = WAYS[name]
    every = max(1, round(samples / way.samples / EVALUATIONS))
    steps = 2 * samples // 8  # more than any takes: the task ends the run
    return (
        f"{SHARED} --run.seed {seed} --train.steps {steps} --train.eval-every {every} {way.options}"
    )


def train(name: str, seed: int, samples: int) -> dict[str, Any]:
    """Train once, and return the command and (samples, seconds, validation loss) by evaluation."""
    command = command_of(name, seed, samples)
    settings = {
        "COMPETITORS": f"1:{COMPETITORS}:1:{10**9}",
        "SAMPLES": str(samples),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE / 'ranks'}{os.pathsep}{HERE.parent}",
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        output_of([*shlex.split(command), "--run.dir", str(run)], here() | settings, LIMIT_S)
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = accumulate(record["samples"] for record in records)
    seconds = accumulate(record["step_s"] for record in records)
    points = [
        (count, s, record["eval_loss"])
        for count, s, record in zip(seen, seconds, records, strict=True)
        if "eval_loss" in record
    ]
    return {
        "command": command,
        "steps": len(records),
        "samples": sum(record["samples"] for record in records),
        "seconds": sum(record["step_s"] for record in records),
        "points": points,
    }


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page `name` and its plots."""
    results, images = folders(output)
    write(results, name, page, report(page, name))
    colors = dict(zip(WAYS, (figures.INK, *figures.OURS), strict=False))
    for axis, label in enumerate(("samples", "seconds")):
        curves = {way: curve(list(runs.values()), axis) for way, runs in page["runs"].items()}
        figures.line_chart(
            images / f"{name}-{label}.svg",
            "Validation loss with a rank of a quarter of the speed",
            curves,
            colors=colors,
            x_label=label,
            y_label="loss, nats per byte",
        )


def curve(runs: Sequence[dict[str, Any]], axis: int) -> list[tuple[float, float]]:
    """Return the mean loss over seeds by samples (axis 0) or seconds (1)."""
    lines = [[(point[axis], point[2]) for point in run["points"]] for run in runs]
    low, high = max(line[0][0] for line in lines), min(line[-1][0] for line in lines)
    places = [low + (high - low) * i / EVALUATIONS for i in range(EVALUATIONS + 1)]
    return [(x, mean(loss_at(line, x) for line in lines)) for x in places]


def loss_at(line: Sequence[tuple[float, float]], x: float) -> float:
    """Return the loss of a curve at x; behind its end, the last one."""
    loss = figures.value_at(line, x)
    return line[-1][1] if loss is None else loss


def report(page: dict[str, Any], name: str) -> str:
    """Return the page as Markdown."""
    plain = list(page["runs"][EQUAL].values())
    about = (
        "The built-in task with its default model of 0.9 M parameters on windows of 128 bytes, two "
        f"ranks that are bound to one core each; {COMPETITORS} processes that compute share "
        f"the core of rank 1. Every run ends after about {page['samples']:,} windows, with the "
        "same learning rate in each step. The "
        "loss is over 64 validation windows, in nats per byte; means, minima and maxima are over "
        "seeds. Seconds are those of steps, without evaluations."
    )
    head = ["division", "steps", "samples per s", "seconds", "loss at the end", "min - max"]
    head.append("loss of equal parts by then")
    rows = []
    for way, made in page["runs"].items():
        runs = list(made.values())
        losses = [run["points"][-1][2] for run in runs]
        seconds = median(run["points"][-1][1] for run in runs)  # of the last evaluation
        by_then = mean(loss_at([point[1:] for point in run["points"]], seconds) for run in plain)
        cells = [
            way,
            f"{median(run['steps'] for run in runs):.0f}",
            f"{median(run['samples'] / run['seconds'] for run in runs):.1f}",
            f"{seconds:.0f}",
            f"{mean(losses):.3f}",
            f"{min(losses):.3f} - {max(losses):.3f}",
            "" if way == EQUAL else f"{by_then:.3f}",
        ]
        rows.append(cells)
    lines = [
        *heading(page, "Losses on ranks of unequal speed", {"torch": page["torch"]}, about),
        *([page["note"], ""] if "note" in page else []),
        "It runs, for each seed:",
        "",
        *(f"    {next(iter(runs.values()))['command']}" for runs in page["runs"].values()),
        "",
        *table(head, rows),
        "",
        f"![validation loss against samples](../img/{name}-samples.svg)",
        "",
        f"![validation loss against seconds](../img/{name}-seconds.svg)",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
