"""Losses of the built-in task with each wire dtype, one run each."""

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import figures
from emulated import Layout, facts, folders, heading, nodes, table, write

WIRES = ("fp32", "bf16", "fp16")
LAST = 10  # steps in the final mean
ROWS = 12  # approximate number of steps in the table


def measure(steps: int) -> dict[str, Any]:
    """Train once with each wire dtype, on four ranks on two virtual nodes."""
    before = facts()
    losses, commands, summary = {}, {}, {}
    for wire in WIRES:
        options = ["--comm.ranks-per-node", "2", "--comm.wire-dtype", wire]
        options += ["--train.steps", str(steps), "--train.eval-every", "0"]
        command = ["-m", "mntrain", *options]
        commands[wire] = " ".join(["mpirun -n 4 python", *command])
        with nodes(Layout((4,), None)) as running, tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            running.output([sys.executable, *command, "--run.dir", str(run)])
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


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page as Markdown and JSON, and plot the losses."""
    results, images = folders(output)
    write(results, name, page, report(page, name))
    losses = page["losses"]
    figures.line_chart(
        images / f"{name}.svg",
        "Training loss by wire dtype",
        {wire: list(enumerate(values, 1)) for wire, values in losses.items()},
        colors=dict(zip(losses, (figures.INK, figures.OURS[0], figures.BASELINE), strict=True)),
        dashed=WIRES[1:],
        x_label="step",
        y_label="loss, nats per byte",
    )


def report(page: dict[str, Any], name: str) -> str:
    """Return the page as Markdown."""
    library, _, version = page["library"].rpartition(" ")
    losses, count = page["losses"], len(page["losses"]["fp32"])
    steps = sorted({1, *range(count // ROWS, count, max(1, count // ROWS)), count} - {0})
    about = (
        f"The built-in task on {page['topology']} (virtual nodes), with the same seed. Gradients "
        "are fp32 and cross nodes in the wire dtype."
    )
    rows = {str(step): [values[step - 1] for values in losses.values()] for step in steps}
    last = min(LAST, count)
    rows[f"mean of the last {last}"] = [mean(values[-last:]) for values in losses.values()]
    cells = ([name, *(f"{value:.5f}" for value in values)] for name, values in rows.items())
    lines = [
        *heading(page, "Training loss by wire dtype", {library: version}, about),
        "It runs:",
        "",
        *(f"    {command}" for command in page["commands"].values()),
        "",
        *table(["step", *losses], cells, texts=0),
    ]
    for wire in WIRES[1:]:
        differences = [abs(a - b) for a, b in zip(losses[wire], losses["fp32"], strict=True)]
        largest = max(differences)
        step = differences.index(largest) + 1
        lines += ["", f"The largest difference of {wire} to fp32 is {largest:.2g}, at step {step}."]
    lines += ["", f"![training loss against step, by wire dtype](../img/{name}.svg)"]
    return "\n".join(lines) + "\n"
