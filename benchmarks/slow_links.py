"""Compare the losses of ways to train over slow links: fewer bytes in every step, or exchanges.

    python benchmarks/slow_links.py [--steps 1000] [--seeds 3] [--batch-size 8] [--modes NAME ...]

Every mode trains the built-in task with its default model on two virtual nodes of one rank, from
the same weights and on the same samples for a seed. Losses depend neither on links nor on times, so
the nodes share a host; for times see step.py, whose --link shapes the links. Writes
docs/results/slow-links.md and its figures, and plots to docs/img/. Takes an hour and a half on 2
cores.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import figures
import option_types
import torch
from emulated import HERE, environment_line, facts, folders, here, output_of, write

RARELY = "--sync.mode {} --sync.every {} --sync.warmup 100"
MODES = {
    "every step, fp32": "",
    "bf16": "--comm.compress bf16",
    "int8": "--comm.compress int8",
    "powersgd (rank 4)": "--comm.compress powersgd",
    "topk (1 %)": "--comm.compress topk",
    **{f"local SGD, every {every}": RARELY.format("local-sgd", every) for every in (20, 50)},
    **{f"DiLoCo, every {every}": RARELY.format("diloco", every) for every in (20, 50)},
    **{f"streaming, every {every}": RARELY.format("streaming", every) for every in (20, 50)},
    "SparseLoCo, every 30": RARELY.format("sparseloco", 30),
}
SYNCHRONOUS = "every step, fp32"
EVALUATIONS = 20
EVAL_SAMPLES = 512
LIMIT_S = 3600  # for one run


def main() -> int:
    """Train in every mode with every seed, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=option_types.count, default=1000)
    parser.add_argument("--seeds", type=option_types.count, default=3)
    parser.add_argument("--batch-size", type=option_types.count, default=8)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    options = parser.parse_args()
    page: dict[str, Any] = {**facts(), "torch": torch.__version__, "runs": {}}
    for seed in range(options.seeds):  # modes take turns, so that the machine's hours are shared
        for mode in options.modes:
            page["runs"].setdefault(mode, []).append(train(mode, seed, options))
            print(f"seed {seed}, {mode}: done", file=sys.stderr)
    page |= {"steps": options.steps, "batch_size": options.batch_size}
    results, images = folders(options.output)
    write(results, "slow-links", page, report(page))
    plot(page, images)
    return 0


def command_of(mode: str, seed: int, options: argparse.Namespace) -> str:
    """Return the command of a run, without its directory."""
    shared = {
        "comm.ranks-per-node": 1,
        "run.seed": seed,
        "train.steps": options.steps,
        "train.batch-size": options.batch_size,
        "train.eval-every": max(1, options.steps // EVALUATIONS),
        "train.eval-samples": EVAL_SAMPLES,
    }
    words = [f"--{name} {value}" for name, value in shared.items()]
    return " ".join(["mpirun -n 2 python -m mntrain", *words, MODES[mode]]).strip()


def train(mode: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once, and return the command, the evaluations and the bytes between nodes."""
    command = command_of(mode, seed, options)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        output_of([*shlex.split(command), "--run.dir", str(run)], here(), LIMIT_S)
        records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        evaluated = [record for record in records if record.get("eval_loss") is not None]
        summary = json.loads((run / "summary.json").read_text())
    return {
        "command": command,
        "evaluations": [[record["step"], record["eval_loss"]] for record in evaluated],
        "bytes_between_nodes": sum(rank["cross_bytes"] for rank in summary["ranks"]),
    }


def report(page: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    runs, seeds = page["runs"], len(next(iter(page["runs"].values())))
    lines = [
        "# Losses over slow links",
        "",
        f"{environment_line(page, {'torch': page['torch']})}. The built-in task with its default "
        f"model of 0.9 M parameters, {page['batch_size']} windows of 128 bytes a step, "
        f"{page['steps']:,} steps, two virtual nodes of one rank, {seeds} seeds, AdamW with its "
        f"default schedule. The validation loss is over {EVAL_SAMPLES} windows, in nats per byte, "
        "of the nodes' mean. Modes that exchange rarely begin with 100 synchronous steps, and "
        "PowerSGD with 100 steps without compression. Command:",
        "",
        f"    {page['command']}",
        "",
        "It runs, for each seed:",
        "",
        *(f"    {made[0]['command']}" for made in runs.values()),
        "",
        "| mode | validation loss, mean | least | most | vs. fp32 | MB sent | fewer bytes, times |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    plain = runs.get(SYNCHRONOUS)
    for mode, made in runs.items():
        losses, sent = final_losses(made), mean(run["bytes_between_nodes"] for run in made)
        against, fewer = "", ""
        if plain is not None:
            against = f"{mean(losses) / mean(final_losses(plain)) - 1:+.2%}"
            fewer = f"{mean(run['bytes_between_nodes'] for run in plain) / sent:.1f}"
        spread = f"{mean(losses):.4f} | {min(losses):.4f} | {max(losses):.4f}"
        lines.append(f"| {mode} | {spread} | {against} | {sent / 1e6:.1f} | {fewer} |")
    lines += [
        "",
        "MB sent are those of both nodes together, with the broadcast of the initial weights, the "
        "evaluations' averages, and the losses and flags of every step.",
        "",
        "![validation loss against step](../img/slow-links-steps.svg)",
        "",
        "![validation loss against bytes sent](../img/slow-links-bytes.svg)",
    ]
    return "\n".join(lines) + "\n"


def final_losses(runs: list[dict[str, Any]]) -> list[float]:
    """Return the last validation loss of each seed."""
    return [run["evaluations"][-1][1] for run in runs]


def plot(page: dict[str, Any], images: Path) -> None:
    """Plot the mean loss over seeds against steps, and against megabytes between nodes."""
    by_step: dict[str, list[tuple[float, float]]] = {}
    by_bytes: dict[str, list[tuple[float, float]]] = {}
    for mode, runs in page["runs"].items():
        points = [
            (step, mean(run["evaluations"][index][1] for run in runs))
            for index, (step, _) in enumerate(runs[0]["evaluations"])
        ]
        sent = mean(run["bytes_between_nodes"] for run in runs) / 1e6
        by_step[mode] = points[1:]  # the first ones would set the scale
        by_bytes[mode] = [(step / page["steps"] * sent, loss) for step, loss in points[1:]]
    palette = (figures.INK, *figures.OURS, *figures.OTHERS)
    colors = dict(zip(by_step, palette, strict=False))
    for name, lines, label in (
        ("steps", by_step, "step"),
        ("bytes", by_bytes, "MB sent between nodes (in proportion to steps)"),
    ):
        figures.line_chart(
            images / f"slow-links-{name}.svg",
            "Validation loss",
            lines,
            colors=colors,
            x_label=label,
            y_label="loss, nats per byte",
        )


if __name__ == "__main__":
    sys.exit(main())
