"""How well the built-in task learns with each wire dtype: losses of one run each, side by side."""

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import svg
from emulated import Layout, facts, imprint, nodes

WIRES = ("fp32", "bf16", "fp16")
LAST = 10  # steps, of which a mean is given
ROWS = 12  # about so many steps are in the table


def measure(steps: int) -> dict[str, Any]:
    """Train once with each wire dtype, on four ranks as if on two nodes: a page of losses."""
    before = facts()
    losses, commands, summary = {}, {}, {}
    for wire in WIRES:
        options = ["--comm.ranks-per-node", "2", "--comm.wire-dtype", wire]
        options += ["--train.steps", str(steps), "--train.eval-every", "0"]
        command = ["-m", "mntrain", *options]
        commands[wire] = " ".join(["mpirun -n 4 python", *command])
        with nodes(Layout((4,), None)) as up, tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            up.output([sys.executable, *command, "--run.dir", str(run)])
            metrics = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            losses[wire] = [record["loss"] for record in metrics if "loss" in record]
            summary = json.loads((run / "summary.json").read_text())
        print(f"wire dtype {wire}: done", file=sys.stderr)
    return {
        **before,
        "library": summary["world"]["library"],
        "topology": summary["world"]["topology"],
        "commands": commands,
        "losses": losses,
    }


def report(page: dict[str, Any]) -> str:
    """The losses as a page of Markdown."""
    name, _, number = page["library"].rpartition(" ")
    losses, count = page["losses"], len(page["losses"]["fp32"])
    steps = sorted({1, *range(count // ROWS, count, max(1, count // ROWS)), count} - {0})
    lines = [
        "# Losses by wire dtype",
        "",
        f"{imprint(page, {name: number})}. The built-in task on "
        f"{page['topology']} (virtual nodes), the same seed; gradients in fp32, which travel "
        "between nodes in the wire dtype; by:",
        "",
        f"    {page['command']}",
        "",
        "which runs:",
        "",
        *(f"    {command}" for command in page["commands"].values()),
        "",
        "| step | " + " | ".join(losses) + " |",
        "|--:|" + "--:|" * len(losses),
    ]
    for step in steps:
        row = " | ".join(f"{found[step - 1]:.5f}" for found in losses.values())
        lines += [f"| {step} | {row} |"]
    last = min(LAST, count)
    means = " | ".join(f"{mean(found[-last:]):.5f}" for found in losses.values())
    lines.append(f"| mean of the last {last} | {means} |")
    for wire in WIRES[1:]:
        apart = [abs(a - b) for a, b in zip(losses[wire], losses["fp32"], strict=True)]
        step = apart.index(max(apart)) + 1
        lines += ["", f"{wire} is {max(apart):.2g} from fp32 at most, at step {step}."]
    lines += ["", "![loss against step, by wire dtype](../img/wire-dtype.svg)"]
    return "\n".join(lines) + "\n"


def picture(page: dict[str, Any]) -> str:
    """Loss against step, a line a dtype."""
    losses = page["losses"]
    count = len(losses["fp32"])
    every = [loss for found in losses.values() for loss in found]
    low, high = int(min(every)), int(max(every)) + 1
    return svg.curves(
        "Training loss by wire dtype",
        {wire: list(enumerate(found, 1)) for wire, found in losses.items()},
        colors=dict(zip(losses, (svg.INK, svg.OURS[0], svg.ALONE), strict=True)),
        x_marks={f"step {step}": step for step in sorted({1, count // 2 or 1, count})},
        dashed=WIRES[1:],
        y_marks={str(loss): loss for loss in range(low, high + 1)},
    )
