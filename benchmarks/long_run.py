"""Train the built-in task for long, and nanoGPT's recipe in plain torch on the same text.

    python benchmarks/long_run.py [--steps 4000] [--ranks 2] [--data PATH] [--variants NAME ...]

All runs see the same number of tokens per step and are evaluated on the same windows; each has the
machine for itself. The built-in task runs with its defaults, once with AdamW and once with Muon.
nanoGPT's recipe (benchmarks/nanogpt.py) is one process with all cores. Writes
docs/results/long-run.md and its figures, and a plot to docs/img/. Takes about 70 minutes on 2
cores.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import figures
import option_types
import torch
from emulated import HERE, facts, folders, heading, here, output_of, table, write

from mntrain.config import Config

EVAL_SAMPLES = 1024  # windows
LIMIT_S = 4 * 3600  # for one run
MNTRAIN = "mpirun -n {ranks} python -m mntrain --optim.name {optimizer} {train}"
VARIANTS = {
    "mntrain, AdamW": MNTRAIN.replace("{optimizer}", "AdamW"),
    "mntrain, Muon": MNTRAIN.replace("{optimizer}", "Muon"),
    "nanoGPT's recipe": "python benchmarks/nanogpt.py {plain}",
}
ROWS = 10  # of the table


def main() -> int:
    """Train each variant, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=option_types.count, default=4000)
    parser.add_argument("--ranks", type=option_types.count, default=2)
    parser.add_argument("--data", type=Path, help="text; by default Python's own library")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--note", help="what a reader of the page has to know of this measurement")
    parser.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    options = parser.parse_args()
    page = {**facts(), "torch": torch.__version__, "ranks": options.ranks, "runs": {}}
    if options.note:
        page["note"] = options.note
    for name in options.variants:
        page["runs"][name] = train(name, options)
        print(f"{name}: done", file=sys.stderr)
    publish(page, "long-run", options.output)
    return 0


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page `name` and its image."""
    results, images = folders(output)
    write(results, name, page, report(page))
    losses = {
        variant: [(record["step"], record["eval_loss"]) for record in run["evaluations"]]
        for variant, run in page["runs"].items()
    }
    figures.line_chart(
        images / f"{name}.svg",
        "Validation loss",
        losses,
        colors=figures.line_colors(list(losses)),
        x_label="step",
        y_label="loss, nats per byte",
    )


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one variant, and return its command, time and losses."""
    numbers = {
        "steps": options.steps,
        "eval-every": max(1, options.steps // 40),
        "eval-samples": EVAL_SAMPLES,
    }
    data = f" --data.path {shlex.quote(str(options.data))}" if options.data else ""
    command = VARIANTS[name].format(
        ranks=options.ranks,
        train=" ".join(f"--train.{option} {value}" for option, value in numbers.items()) + data,
        plain=" ".join(f"--{option} {value}" for option, value in numbers.items()) + data,
    )
    with tempfile.TemporaryDirectory() as folder:
        output_of([*shlex.split(command), "--run.dir", folder], here(), LIMIT_S)
        text = (Path(folder) / "metrics.jsonl").read_text()
    records = [record for line in text.splitlines() if "loss" in (record := json.loads(line))]
    evaluated = [record for record in records if record.get("eval_loss") is not None]
    return {
        "command": command,
        "seconds": sum(record["step_s"] for record in records),
        "losses": [record["loss"] for record in records],
        "evaluations": [
            {"step": record["step"], "eval_loss": record["eval_loss"]} for record in evaluated
        ],
    }


def report(page: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    config, runs = Config(), page["runs"]
    shape, batch = config.model, config.train.batch_size
    steps = len(next(iter(runs.values()))["losses"])
    about = (
        f"Models of {shape.layers} layers, {shape.heads} heads and width {shape.width} on windows "
        f"of {shape.context} bytes, "
        f"{batch} windows a step, {steps:,} steps: {steps * batch * shape.context / 1e6:.1f} "
        "million bytes of text. The validation loss is the mean over the same "
        f"{EVAL_SAMPLES:,} windows. mntrain runs with its defaults on {page['ranks']} ranks; "
        "nanoGPT's recipe (learned positions, LayerNorm, GELU, its learning rate for small models, "
        "no dropout) in plain torch in one process. One seed."
    )
    evaluations = list(zip(*(run["evaluations"] for run in runs.values()), strict=True))
    rows = [
        [f"{row[0]['step']:,}", *(f"{record['eval_loss']:.4f}" for record in row)]
        for row in evaluations[:: -max(1, len(evaluations) // ROWS)][::-1]
    ]
    rows.append(["minutes", *(f"{run['seconds'] / 60:.1f}" for run in runs.values())])
    title = "A long run beside nanoGPT's recipe"
    lines = [
        *heading(page, title, {"torch": page["torch"]}, about),
        "It runs:",
        "",
        *(f"    {run['command']}" for run in runs.values()),
        "",
        "Validation loss in nats per byte:",
        "",
        *table(["step", *runs], rows, texts=0),
        "",
        *([page["note"], ""] if "note" in page else []),
        "![validation loss against step](../img/long-run.svg)",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
