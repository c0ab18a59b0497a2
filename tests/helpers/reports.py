"""Consoles, and what to report on them, for the tests of what a person sees of a run."""

import io
from pathlib import Path

import pyte
from rich.console import Console

from mntrain.metrics.display import Display
from mntrain.metrics.registry import METRICS, StepRecord
from mntrain.metrics.writers import MetricsFiles
from mntrain.options.config import LogConfig
from mntrain.rank_info import Place, Usage
from mntrain.run.final_report import final_lines
from mntrain.run.job_resources import memory_by_role
from zero.memory import Memory


def console(terminal: bool, **options) -> Console:
    environment = {"TERM": "xterm", "COLUMNS": "80"}
    defaults = {"width": 80, "_environ": environment, "file": io.StringIO()}
    return Console(force_terminal=terminal, **(defaults | options))


def screen(on: Console) -> list[str]:
    """The lines that a terminal of the console's size is left with, above its first row too."""
    return emulate(on.file.getvalue(), on.width, on.height)[0]


def emulate(output: str, width: int, height: int) -> tuple[list[str], pyte.HistoryScreen]:
    """The lines, above the first row too, and the screen of a terminal that got this output."""
    emulated = pyte.HistoryScreen(width, height, history=10_000)
    emulated.set_mode(pyte.modes.LNM)  # a line feed returns to the first column, as on a terminal
    pyte.Stream(emulated).feed(output)
    return lines_of(emulated), emulated


def lines_of(screen: pyte.HistoryScreen) -> list[str]:
    """The lines of a terminal, above its first row too."""
    above = ["".join(row[i].data for i in range(screen.columns)) for row in screen.history.top]
    return [line.rstrip() for line in "\n".join([*above, *screen.display]).rstrip().split("\n")]


def record(step: int, **changes) -> StepRecord:
    fields = {"loss": 2.4312, "lr": 2.9e-3, "grad_norm": 0.81, "clip_coef": 1.0}
    fields |= {"clipped_norm": 0.81, "samples": 32, "tokens_per_s": 12300.0, "step_s": 0.5}
    fields |= {"data": 0.05, "forward": 0.1, "backward": 0.2, "reduce_wait": 0.05}
    fields |= {"optimizer": 0.05, "communication": 0.2, "exposed": 0.05, "metrics": {}}
    return StepRecord(step=step, **(fields | changes))


def places(size: int, per_node: int, device: str = "cpu", host: str = "n{}") -> list[Place]:
    return [
        Place(
            rank=r,
            host=host.format(r // per_node),
            node=r // per_node,
            local_rank=r % per_node,
            device=device,
            threads=2,
            cpus=4,
            memory=24 * 2**30,
        )
        for r in range(size)
    ]


def rank(number: int, **changes) -> dict:
    fields = {"rank": number, "host": "n0", "node": 0, "local_rank": number, "device": "cpu"}
    fields |= {"threads": 1, "peak_memory": 2**20, "peak_device_memory": 0}
    fields |= {"node_messages": 0, "node_bytes": 0, "cross_messages": 0, "cross_bytes": 0}
    fields |= {"communication_s": 2.0, "exposed_s": 0.5}
    fields |= {"gpu": "", "model": "", "device_memory": 0, "reserved_memory": 0}
    fields |= {"peak_reserved_memory": 0, "pinned_memory": 0}
    return fields | changes


def line(step: int, **changes) -> dict:
    """A line of metrics.jsonl."""
    return record(step, **changes).to_json()


def write(folder: Path, log: LogConfig, *lines: dict, succeeded: bool = True) -> list[str]:
    """Write the lines of one job, and return its warnings."""
    warnings: list[str] = []
    folder.mkdir(exist_ok=True)
    files = MetricsFiles(folder, log, warnings.append)
    for one in lines:
        files.write(one)
    files.close(succeeded=succeeded)
    return warnings


def skipped(step: int, **changes) -> StepRecord:
    """A step whose gradient was not finite."""
    absent = dict.fromkeys(("grad_norm", "clip_coef", "clipped_norm"))
    return record(step, skipped=True, **(absent | changes))


def used(peak_memory: int, peak_device_memory: int = 0, **changes: int) -> Usage:
    return Usage(peak_memory, peak_device_memory, 0, 0, 0, 0, 0.0, 0.0, **changes)


def summary(**changes) -> dict:
    world = {"size": 1, "nodes": 1, "topology": "1 rank", "algorithm": "flat", "library": "MPICH"}
    world["transport"] = ""
    fields = {metric.summary: None for metric in METRICS.values() if metric.summary}
    fields |= {"status": "completed", "steps": 4, "final_loss": 1.5, "eval_loss": 1.6}
    fields |= {"eval_metrics": {"accuracy": 0.93}, "wall_s": 67.2, "tokens_per_s": 12345.0}
    fields["items"] = "items"
    fields |= {"step_tokens_per_s": 13456.0}
    roles = [Memory(parameters=100, gradients=100, buckets=0, master=0, state=200)]
    fields |= {"model_flops_per_s": None, "utilisation": None, "computes_in": "fp32"}
    fields |= {"stage": 0, "partition": "element", "precision": "fp32", "wire_dtype": "fp32"}
    fields |= {"gather_dtype": "fp32", "compress": "none", "sync": "every-step"}
    fields |= {"skipped_steps": 0, "memory": memory_by_role(roles, [used(2**20)])}
    fields |= {"samples": 800, "samples_per_s": 11.9, "communication_s": 2.0, "exposed_s": 0.5}
    fields["traffic"] = dict.fromkeys(
        ("node_messages", "node_bytes", "cross_messages", "cross_bytes"), 0
    )
    fields["checks"] = {"weights": 2, "seconds": 0.0123}
    fields["compression"] = {"before_bytes": 0, "sent_bytes": 0, "ratio": None}
    return fields | {"run_dir": "runs/a", "world": world, "ranks": [rank(0)]} | changes


def finish(display: Display, **changes) -> None:
    """End the report of a job of 4 steps."""
    whole = summary(**changes)
    display.finish(whole["status"], final_lines(whole, 4, "items"))


def reporting(on: Console, steps: int = 4) -> Display:
    return Display(True, steps, "items", on)


def run_steps(on: Console, numbers: range, steps: int, **changes) -> None:
    with reporting(on, steps) as display:
        for number in numbers:
            display.step(record(number, **changes))


def finished(**changes) -> list[str]:
    """The lines with which a run ends."""
    on = console(False)
    with reporting(on) as display:
        display.step(record(4))
        finish(display, **changes)
    return [line.strip() for line in on.file.getvalue().splitlines()[1:]]
