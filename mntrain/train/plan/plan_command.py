"""`python -m mntrain plan`: what a job will take, in tables. One process, without MPI and GPU."""

# Modules that import torch are imported inside functions: --help needs none of them.
# ruff: noqa: PLC0415

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.filesize import decimal
from rich.table import Table

from mntrain.metrics.terminal import stdout
from mntrain.train.plan import plan_options

if TYPE_CHECKING:
    from mntrain.train.plan.job_plan import PlannedJob

_WIDTH = 160  # of a table in a file
_ROLES = ("parameters", "gradients", "buckets", "master", "state", "hook")


def run(words: Sequence[str]) -> int:
    """Run a command line and return its exit code: 0, or 2 for bad input.

    Raises SystemExit, with 2 for a malformed command line and 0 after --help.
    """
    options = plan_options.parse(words)
    from mntrain.train.plan.job_plan import JobPlan, smallest

    console = stdout()
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    try:
        plan = JobPlan(options)
        for precision in options.precisions:
            jobs = list(plan.jobs(precision))
            console.print(_table(precision, jobs))
            if options.memory is not None:
                console.print(_fit_text(smallest(jobs, options.memory), options.memory))
            if options.checkpoint.local is not None:
                for text in dict.fromkeys(map(local_text, jobs)):
                    console.print(text, soft_wrap=True)
            console.print()
    except (ValueError, ImportError, OSError) as error:
        print(f"mntrain: {error}", file=sys.stderr)
        return 2
    for note in [*plan.notes, *_REMARKS]:
        console.print(note, soft_wrap=True, style="dim")
    return 0


_REMARKS = (
    "memory of a rank, the most over ranks; untrained: frozen parameters and buffers; in nodes and "
    "between: the bytes of gradients and parameters that all ranks together send in a step",
    "~ estimated: activations are the most that a forward and backward of one micro-batch takes "
    "at a time; what Python, CUDA and message buffers take comes on top",
)


def _table(precision: str, jobs: Sequence["PlannedJob"]) -> Table:
    """Return the table of a precision: a line for each number of ranks and stage."""
    roles = [role for role in _ROLES if any(getattr(job.most, role) for job in jobs)]
    untrained = ["untrained"] * any(job.untrained for job in jobs)
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False, padding=(0, 1, 0, 0))
    heads = ["stage", *roles, *untrained, "activations ~", "total ~", "in nodes", "between"]
    table.add_column(precision, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    counts = Counter(job.topology.size for job in jobs)
    for job in jobs:
        nodes = len(job.topology.nodes)
        ranks = f"{job.topology.size} rank" + "s" * (job.topology.size > 1)
        sizes = [getattr(job.most, role) for role in roles]
        sent = [job.sent.node, job.sent.cross] if job.sent else [None, None]
        sizes += [job.untrained] * len(untrained)
        cells = [*sizes, job.activations, job.total, *sent]
        table.add_row(
            f"{ranks}, {nodes} nodes" if nodes > 1 else ranks,
            str(job.stage) if counts[job.topology.size] > 1 else "any",
            *(_size(cell) for cell in cells),
            end_section=job.stage == counts[job.topology.size] - 1,
        )
    return table


def _size(nbytes: float | None) -> str:
    return "?" if nbytes is None else decimal(round(nbytes)) if nbytes else "0"


def local_text(job: "PlannedJob") -> str:
    """Return what checkpoints in the nodes' memory take: see `mntrain.checkpoint.local_saver`."""
    whole, nodes = job.checkpoint, len(job.topology.nodes)
    of_node = round(whole * max(map(len, job.topology.nodes)) / job.topology.size)
    kept, sent, shares = "two steps", "", 1
    if nodes > 1:
        kept, shares = "two steps, and two of its partner's", 2
        sent = f"a save sends {decimal(whole)} between nodes; "
    return (
        f"--checkpoint.local on {job.topology}: a node keeps up to "
        f"{decimal(2 * shares * of_node)} there ({kept}), and {decimal(of_node)} as a "
        f"snapshot; {sent}a restart takes up to {decimal(whole + shares * of_node)} there"
    )


def _fit_text(job: "PlannedJob | None", memory: int) -> str:
    whole, unit = (memory / 2**30, "GiB") if memory >= 2**30 else (memory / 2**20, "MiB")
    given = f"{whole:.4g} {unit} ({decimal(memory)})"
    if job is None:
        return f"none of these fits into {given}: give more --ranks, or a smaller micro-batch"
    stage = f" at stage {job.stage}" if job.topology.size > 1 else ""
    return f"the smallest that fits into {given}: {job.topology}{stage}, with {decimal(job.total)}"
