"""Compare ways to train over slow links: losses by step, by bytes between nodes, and by time.

    python benchmarks/slow_links.py [--steps 1000] [--seeds 3] [--batch-size 8] [--modes NAME ...]

Every mode trains the built-in task on two nodes of one rank, from the same weights and on the same
samples for a seed; peers are torch's own ways over gloo (ranks/peer_losses.py). Losses depend
neither on links nor on times, so for them the nodes are virtual ones of one host. Then, unless
`--links` is empty, every mode is timed on emulated nodes with links of these rates, in turns with
computing alone (as in step.py; root). Each result is saved
as it comes: the same command again goes on where it stopped. Writes docs/results/NAME.md and its
figures, and plots to docs/img/. Takes two hours and a half on 2 cores.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import option_types
import slow_page
import torch
from emulated import (
    HERE,
    Layout,
    facts,
    folders,
    here,
    need_nodes,
    nodes,
    output_of,
    parse_report,
)
from slow_modes import MODES

EVALUATIONS = 10
EVAL_SAMPLES = 256
MNTRAIN = "mpirun -n 2 python -m mntrain"
LIMIT_S = 3600  # for one run
LAYOUT, MODEL = "1,1", "0.9M"  # of the timings
BASELINES = ("compute only, barriers",)
STEPS, TURNS = 10, 3  # of a timing, in whole intervals between exchanges


def main() -> int:
    """Train in every mode with every seed, time every mode, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=option_types.count, default=1000)
    parser.add_argument("--seeds", type=option_types.count, default=3)
    parser.add_argument("--batch-size", type=option_types.count, default=8)
    parser.add_argument("--context", type=option_types.count, default=64, help="bytes of a window")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--links", nargs="*", type=option_types.rate, default=["0.1gbit", "1gbit"])
    parser.add_argument("--model", default="", help="options of the model, other than the defaults")
    parser.add_argument("--name", default="slow-links", help="of the page")
    parser.add_argument("--note", help="what a reader of the page has to know of this measurement")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    options = parser.parse_args()
    path = folders(options.output)[0] / f"{options.name}.json"
    page = json.loads(path.read_text()) if path.exists() else new_page(options)
    if options.note:
        page["note"] = options.note

    def save() -> None:
        path.write_text(json.dumps(page, indent=1) + "\n")

    for seed in range(options.seeds):  # modes take turns, so that the machine's hours are shared
        for mode in options.modes:
            run = page["runs"].setdefault(mode, {})
            if run.get(str(seed), {}).get("command") != command_of(mode, seed, options):
                run[str(seed)] = train(mode, seed, options)
                save()
                print(f"seed {seed}, {mode}: {final(run[str(seed)])}", file=sys.stderr, flush=True)
    for mode in options.modes:
        if not MODES[mode].peer and mode not in page["bytes"]:
            page["bytes"][mode] = bytes_per_step(mode, options)
            save()
    for link in options.links:
        time_modes(options.modes, link, page["links"].setdefault(link, {}), save)
    slow_page.publish(page, options.name, options.output)
    return 0


def new_page(options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts of a page without results."""
    return {
        **facts(),
        "torch": torch.__version__,
        "steps": options.steps,
        "batch_size": options.batch_size,
        "context": options.context,
        "eval_samples": EVAL_SAMPLES,
        "model": options.model,
        "runs": {},
        "bytes": {},
        "links": {},
    }


def command_of(mode: str, seed: int, options: argparse.Namespace) -> str:
    """Return the command of a run, without its directory."""
    way = MODES[mode]
    evaluations = max(1, options.steps // EVALUATIONS)
    if way.peer:
        words = (
            f"mpirun -n 2 python benchmarks/ranks/peer_losses.py --seed {seed} "
            f"--steps {options.steps} --batch-size {options.batch_size} "
            f"--context {options.context} --eval-every {evaluations} --eval-samples {EVAL_SAMPLES} "
            f"{way.options}"
        )
        return words.strip()
    shared = {
        "comm.ranks-per-node": 1,
        "model.context": options.context,
        "run.seed": seed,
        "train.steps": options.steps,
        "train.batch-size": options.batch_size,
        "train.eval-every": evaluations,
        "train.eval-samples": EVAL_SAMPLES,
    }
    words = [f"--{name} {value}" for name, value in shared.items()]
    words += filter(None, [options.model, way.options])
    return " ".join([MNTRAIN, *words])


def train(mode: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once, and return the command and the evaluations."""
    command = command_of(mode, seed, options)
    words = shlex.split(command)
    if MODES[mode].peer:
        result = parse_report(output_of(words, here(), LIMIT_S), words)
        return {"command": command, "evaluations": result["evaluations"]}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        output_of([*words, "--run.dir", str(run)], here(), LIMIT_S)
        records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        evaluated = [record for record in records if record.get("eval_loss") is not None]
    return {
        "command": command,
        "evaluations": [[record["step"], record["eval_loss"]] for record in evaluated],
    }


def bytes_per_step(mode: str, options: argparse.Namespace) -> float:
    """Return the bytes that both nodes send in a step after the warm-up, on the mean.

    Evaluations, and the exchange that ends a run, are left out: it is the difference between two
    short runs, whose steps differ by an interval between exchanges. It does not depend on batches.
    """
    way, sent = MODES[mode], []
    for steps in (way.warmup + way.every, way.warmup + 2 * way.every):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            command = (
                f"{MNTRAIN} --comm.ranks-per-node 1 --train.steps {steps} "
                "--train.batch-size 2 --train.eval-every 0 --train.eval-samples 2 "
                f"--model.context 8 --run.dir {run} {options.model} {way.options}"
            )
            output_of(shlex.split(command), here(), LIMIT_S)
            ranks = json.loads((run / "summary.json").read_text())["ranks"]
            sent.append(sum(rank["cross_bytes"] for rank in ranks))
    return (sent[1] - sent[0]) / way.every


def time_modes(
    modes: list[str], link: str, timed: dict[str, Any], save: Callable[[], None]
) -> None:
    """Add to `timed` the time and the bytes of a step of each mode that has none yet."""
    missing = {MODES[mode].variant for mode in modes} - {"", *timed}
    if not missing:
        return
    need_nodes()
    with nodes(Layout.of(LAYOUT, link)) as running:
        for variant in [*BASELINES, *sorted(missing)]:
            arguments = ["--what", variant, "--model", MODEL, "--steps", STEPS, "--turns", TURNS]
            timed[variant] = running.run("step.py", arguments)
            save()
            print(f"{link}, {variant}: done", file=sys.stderr, flush=True)


def final(run: dict[str, Any]) -> float:
    """Return the last validation loss of a run."""
    return run["evaluations"][-1][1]


if __name__ == "__main__":
    sys.exit(main())
