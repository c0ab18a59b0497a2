"""Compare ways to train over slow links: losses by step, by bytes between nodes, and by time.

    python benchmarks/slow_links.py [--steps 1000] [--seeds 3] [--batch-size 8] [--modes NAME ...]

Every mode trains the built-in task on two nodes of one rank, from the same weights and on the same
samples for a seed. Losses depend neither on links nor on times, so for them the nodes are virtual
ones of one host. Then, unless `--links` is empty, every mode is timed on emulated nodes with links
of these rates, in turns with computing alone (as in step.py; root). Each result is saved as it
comes: the same command again goes on where it stopped. Writes docs/results/NAME.md, and
its figures as NAME.json. Takes two hours on 2 cores.
"""

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from emulated import Layout, nodes, trained
from results import DOCS, TIMES, facts, heading, ratios, save, spread, table, write

EVALUATIONS, EVAL_SAMPLES = 10, 256
MNTRAIN = "mpirun -n 2 python -m mntrain"
BASELINE = "compute only, barriers"
TIMED = ["--model", "0.9M", "--steps", 10, "--turns", 3]  # in whole intervals between exchanges
WARM_UP = 100  # synchronous steps at the start of modes that exchange rarely
SYNCHRONOUS = "every step, fp32"


class Mode(NamedTuple):
    """A way to train."""

    options: str  # of `python -m mntrain`
    variant: str = ""  # of step.py; "": not timed
    every: int = 1  # steps after which exchanges repeat
    warmup: int = 0  # synchronous steps in fp32 at the start


def _rare(mode: str, every: int, variant: str = "", more: str = "") -> Mode:
    options = f"--sync.mode {mode} --sync.every {every} --sync.warmup {WARM_UP}{more}"
    variant = f"mntrain stage 0, {variant} every {every}" if variant else ""
    return Mode(options, variant, every, WARM_UP)


MODES = {
    SYNCHRONOUS: Mode("", "mntrain stage 0"),
    "bf16": Mode("--comm.wire-dtype bf16", "mntrain stage 0, bf16 wire"),
    "int8": Mode("--comm.compress int8", "mntrain stage 0, int8"),
    "local SGD, every 20": _rare("local-sgd", 20, "local SGD"),
    "DiLoCo, every 20": _rare("diloco", 20, "DiLoCo"),
    "SparseLoCo, every 10": _rare("sparseloco", 10),
    "SparseLoCo, every 30": _rare("sparseloco", 30),
    "SparseLoCo, every 5, 1/16": _rare(  # of each 4,096 changes, 256 are sent
        "sparseloco", 5, "SparseLoCo (1/16)", " --sync.density 0.0625"
    ),
}


def main() -> int:
    """Train in every mode with every seed, time every mode, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=64, help="bytes of a window")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--links", nargs="*", default=["0.1gbit", "1gbit"])
    parser.add_argument("--model", default="", help="options of the model, other than the defaults")
    parser.add_argument("--name", default="slow-links", help="of the page")
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    options = parser.parse_args()
    options.modes = list(dict.fromkeys([SYNCHRONOUS, *options.modes]))
    layouts = {link: Layout.of("1,1", link) for link in options.links}
    path = options.output / "results" / f"{options.name}.json"
    empty: dict[str, dict[str, Any]] = {"modes": {}, "runs": {}, "bytes": {}, "links": {}}
    page = {**facts(), "torch": torch.__version__, "eval_samples": EVAL_SAMPLES, **empty}
    page |= {key: getattr(options, key) for key in ("steps", "batch_size", "context", "model")}
    page = json.loads(path.read_text()) if path.exists() else page
    page["modes"] |= {mode: MODES[mode]._asdict() for mode in options.modes}
    for seed in range(options.seeds):  # modes take turns, so that the machine's hours are shared
        for mode in options.modes:
            runs, command = page["runs"].setdefault(mode, {}), command_of(mode, seed, options)
            if runs.get(str(seed), {}).get("command") != command:
                records, _ = trained(command)
                losses = [(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]
                runs[str(seed)] = {"command": command, "evaluations": losses}
                save(options.output, options.name, page)
                print(f"seed {seed}, {mode}: {losses[-1][1]}", file=sys.stderr, flush=True)
    for mode in options.modes:
        if mode not in page["bytes"]:
            page["bytes"][mode] = bytes_per_step(MODES[mode], options)
            save(options.output, options.name, page)
    for link, layout in layouts.items():
        timed = page["links"].setdefault(link, {})
        variants = dict.fromkeys([BASELINE, *(MODES[mode].variant for mode in options.modes)])
        if missing := [it for it in variants if it and it not in timed]:
            with nodes(layout) as running:
                for variant in missing:
                    timed[variant] = running.run("step.py", ["--what", variant, *TIMED])
                    save(options.output, options.name, page)
                    print(f"{link}, {variant}: done", file=sys.stderr, flush=True)
    save(options.output, options.name, page)
    publish(page, options.name, options.output)
    return 0


def command_of(mode: str, seed: int, options: argparse.Namespace) -> str:
    """Return the command of a run, without its directory."""
    shared = {
        "comm.ranks-per-node": 1,
        "model.context": options.context,
        "run.seed": seed,
        "train.steps": options.steps,
        "train.batch-size": options.batch_size,
        "train.eval-every": max(1, options.steps // EVALUATIONS),
        "train.eval-samples": EVAL_SAMPLES,
    }
    words = [f"--{name} {value}" for name, value in shared.items()]
    words += filter(None, [options.model, MODES[mode].options])
    return " ".join([MNTRAIN, *words])


def bytes_per_step(mode: Mode, options: argparse.Namespace) -> float:
    """Return the bytes that both nodes send in a step after the warm-up, on the mean.

    Evaluations, and the exchange that ends a run, are left out: it is the difference between two
    short runs, whose steps differ by an interval between exchanges. It does not depend on batches.
    """
    shared = f"{MNTRAIN} --comm.ranks-per-node 1 --model.context 8 --train.batch-size 2"
    shared += f" --train.eval-every 0 --train.eval-samples 2 {options.model} {mode.options}"
    sent = [
        sum(rank["cross_bytes"] for rank in trained(f"{shared} --train.steps {steps}")[1]["ranks"])
        for steps in (mode.warmup + mode.every, mode.warmup + 2 * mode.every)
    ]
    return (sent[1] - sent[0]) / mode.every


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page."""
    about = (
        f"The built-in task with {page['model'] or 'its default model of 0.9 M parameters'}, on "
        f"two nodes of one rank: windows of {page['context']} bytes, {page['batch_size']} a step, "
        f"{page['steps']:,} steps, AdamW with its default schedule. The validation loss is over "
        f"{page['eval_samples']} windows, in nats per byte, of the mean of the nodes' parameters. "
        f"Modes that exchange rarely begin with {WARM_UP} synchronous steps."
    )
    chosen = {mode: way["options"] for mode, way in page["modes"].items() if way["options"]}
    lines = [
        *heading(page, "Losses over slow links", {"torch": page["torch"]}, about),
        *("It runs, for each seed, with the options of a mode:", ""),
        *(f"    {page['runs'][SYNCHRONOUS]['0']['command']}", ""),
        *(*(f"- {mode}: `{words}`" for mode, words in chosen.items()), ""),
        *(*loss_table(page), ""),
        "*kB per step* are those of both nodes together after the warm-up, with the losses and "
        "flags of every step, without evaluations; those of peers are counted on the link. *Fewer "
        "bytes* is fp32's figure divided by it, and *with the warm-up* the same for the whole run.",
    ]
    for link in page["links"]:
        lines += ["", *time_table(page, link)]
    write(output, name, lines)


def loss_table(page: dict[str, Any]) -> list[str]:
    """Return a Markdown table of losses and bytes."""
    head = ["mode", "seeds", "validation loss, mean", "min - max", "vs. fp32", "kB per step"]
    head += ["fewer bytes", "with the warm-up"]
    costs, rows = page["bytes"], []
    for mode, made in page["runs"].items():
        found, plain = (
            [runs[seed]["evaluations"][-1][1] for seed in made]
            for runs in (made, page["runs"][SYNCHRONOUS])
        )
        sent = ["", "", ""]
        if mode in costs:
            whole = [spent(page, one, page["steps"], costs) for one in (SYNCHRONOUS, mode)]
            fewer = (costs[SYNCHRONOUS] / costs[mode], whole[0] / whole[1])
            digits = (f"{it:,.0f}" if it >= 10 else f"{it:.1f}" for it in fewer)
            sent = [f"{costs[mode] / 1e3:,.1f}", *digits]
        cells = [f"{len(found)}", f"{mean(found):.4f}", f"{min(found):.4f} - {max(found):.4f}"]
        rows.append([mode, *cells, f"{mean(found) / mean(plain) - 1:+.1%}", *sent])
    return table(head, rows)


def time_table(page: dict[str, Any], link: str) -> list[str]:
    """Return the section about a link."""
    jobs = page["links"][link]
    multiples = {it: ratios(job["step_s"], job["alone_s"]) for it, job in jobs.items()}
    alone = [
        s for timed in page["links"].values() for job in timed.values() for s in job["alone_s"]
    ]
    seconds = {
        mode: median(multiples[way["variant"]]) * median(alone)
        for mode, way in page["modes"].items()
        if way["variant"] in multiples and mode in page["runs"]
    }
    rows = [[BASELINE, spread(multiples[BASELINE]), "", "", ""]]
    plain = [
        (spent(page, SYNCHRONOUS, step, seconds), loss)
        for step, loss in curve(page["runs"][SYNCHRONOUS])
    ]
    for mode in seconds:
        end = spent(page, mode, page["steps"], seconds)
        loss, then = curve(page["runs"][mode])[-1][1], value_at(plain, end)
        cells = [f"{end / 60:.2f}", f"{loss:.4f}", "" if then is None else f"{then:.4f}"]
        rows.append([mode, spread(multiples[page["modes"][mode]["variant"]]), *cells])
    rate = "100 Mbit/s" if link == "0.1gbit" else link.replace("gbit", " Gbit/s")
    about = (
        "A step of the same model on two emulated nodes of one rank with such links, in turns with "
        "computing alone, whole intervals between exchanges at a time. *Minutes* is the time of "
        f"the whole run without evaluations, from these multiples of {median(alone) * 1e3:.1f} ms, "
        "the median of computing alone; the last column is the loss that fp32 in every step has "
        "reached by then."
    )
    head = ["mode", f"{TIMES} (min to max)", "minutes", "loss", "loss of fp32 by then"]
    return [f"## At {rate}", "", about, "", *table(head, rows)]


def curve(runs: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the mean loss over seeds by step, without the first evaluation of a new model."""
    by_seed = [dict(map(tuple, run["evaluations"])) for run in runs.values()]
    steps = sorted(set.intersection(*map(set, by_seed)))
    return [(step, mean(losses[step] for losses in by_seed)) for step in steps if step > 1]


def spent(page: dict[str, Any], mode: str, steps: float, cost: dict[str, float]) -> float:
    """Return what so many steps cost; those of the warm-up cost what synchronous ones do."""
    warmup = min(steps, page["modes"][mode]["warmup"])
    return warmup * cost[SYNCHRONOUS] + (steps - warmup) * cost[mode]


def value_at(points: list[tuple[float, float]], x: float) -> float | None:
    """Return the y of a line at x, linear between its points; None outside of them."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


if __name__ == "__main__":
    sys.exit(main())
