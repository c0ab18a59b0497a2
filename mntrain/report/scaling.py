"""The scaling of a job over ranks, as measured by runs: nothing is extrapolated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mntrain.checkpoint.format import read_manifest
from mntrain.checkpoint.reader import list_checkpoints
from mntrain.metrics.registry import WARMUP_STEPS
from mntrain.report import charts
from mntrain.report.page import Section, render, side_by_side, table_of, text_of
from mntrain.report.run_files import RunFiles, differing

_SAME = ("task", "model.", "hf.")  # beginnings of the options that all runs must have in common
_MANY = 1_000_000  # samples, where the length of an epoch is not known


class Measured(NamedTuple):
    """The throughput of a run's last job, in its steps after the warm-up."""

    run: RunFiles
    ranks: int
    nodes: int  # hosts
    batch: int  # samples of a step, over all ranks
    steps: int  # that were measured
    samples_per_s: float
    step_s: tuple[float, float, float]  # the 10th, 50th and 90th percentile
    epoch: int | None  # samples


def measure(run: RunFiles) -> Measured:
    """Return the throughput of a run. Raises ValueError if its files do not tell it."""
    path, summary = run.path, run.summary
    if not ("world" in summary and "task" in run.options):
        raise ValueError(
            f"{path} has no summary.json and config.toml of a job that ended regularly, which say "
            "on how many ranks it ran, and what: give runs of `python -m mntrain`"
        )
    # Steps of earlier jobs may have been taken on other ranks.
    resumed = summary.get("resumed_from")
    first = int(Path(resumed).name.removeprefix("step-")) if resumed else 0
    own = [line for line in run.lines if line["step"] > first and "step_s" in line]
    timed = own[WARMUP_STEPS:]
    if not timed:
        raise ValueError(
            f"{path}: its last job has {len(own)} steps, and the first {WARMUP_STEPS} of a job do "
            "not count: give runs with more steps"
        )
    seconds = [line["step_s"] for line in timed]
    low, middle, high = np.percentile(seconds, [10, 50, 90])
    return Measured(
        run,
        ranks=summary["world"]["size"],
        nodes=len({rank["host"] for rank in summary["ranks"]}),
        batch=max(line["samples"] for line in timed),
        steps=len(timed),
        samples_per_s=sum(line["samples"] for line in timed) / sum(seconds),
        step_s=(low, middle, high),
        epoch=next((n for n in map(_epoch, list_checkpoints(path)) if n), None),
    )


def _epoch(checkpoint: Path) -> int | None:
    try:
        return read_manifest(checkpoint).samples
    except (OSError, ValueError):
        return None


def page_of(runs: Sequence[RunFiles]) -> str:
    """Return the page about the scaling of runs.

    Raises ValueError for runs that cannot be compared: of other models or data, on one number of
    ranks, or whose batches are equal neither as a whole nor by rank.
    """
    if len(runs) < 2:
        raise ValueError("--scaling: give two runs or more, of different numbers of ranks")
    points = sorted(map(measure, runs), key=lambda one: (one.ranks, -one.samples_per_s))
    kind = _kind(points)
    epochs = {one.epoch for one in points if one.epoch}
    if len(epochs) > 1:
        raise ValueError(f"--scaling: epochs have {_listed(epochs)} samples: give runs of one task")
    samples = next(iter(epochs), _MANY)
    base = points[0]
    rows = [
        {
            "run": one.run.label,
            "nodes": one.nodes,
            "ranks": one.ranks,
            "batch": one.batch,
            "steps": one.steps,
            "samples_per_s": one.samples_per_s,
            "step_s": one.step_s[1],
            "10 to 90 % of steps": " to ".join(text_of("_s", end) for end in one.step_s[::2]),
            "speed-up": f"{one.samples_per_s / base.samples_per_s:.2f}",
            "efficiency": _efficiency(one, base),
            "node hours": f"{one.nodes * samples / one.samples_per_s / 3600:.3g}",
        }
        for one in points
    ]
    ranks, rates = [one.ranks for one in points], [one.samples_per_s for one in points]
    shares = [_efficiency(one, base) * 100 for one in points]
    ideal = [base.samples_per_s / base.ranks * count for count in ranks]
    measured = Section("Measured")
    measured.charts = [
        ("samples a second", charts.scaling(ranks, rates, ideal, log=True)),
        ("efficiency, %", charts.scaling(ranks, shares, [100.0] * len(ranks), log=False)),
    ]
    measured.add(table_of(rows))
    options = Section("Options that differ")
    labels = [one.run.label for one in points]
    options.add(side_by_side(labels, differing([one.run for one in points])))
    title = f"{kind.capitalize()} scaling of {base.run.options['task']}"
    notes = _notes(points, kind, samples, known=bool(epochs))
    return render(title, notes, [], [measured, options])


def _kind(points: Sequence[Measured]) -> str:
    """Return which scaling the runs measure. Raises ValueError if it is neither."""
    base = points[0].run
    for one in points[1:]:
        for name in base.options.keys() | one.run.options.keys():
            here, there = (run.options.get(name) for run in (one.run, base))
            if name.startswith(_SAME) and here != there:
                raise ValueError(
                    f"--scaling: {name} is {here} in {one.run.path}, and {there} in "
                    f"{base.path}: give runs of one task and model"
                )
    if len({one.ranks for one in points}) == 1:
        raise ValueError(
            f"--scaling: all runs have {points[0].ranks} ranks: give runs of different numbers"
        )
    if len({one.batch for one in points}) == 1:
        return "strong"
    if len({one.batch / one.ranks for one in points}) == 1:
        return "weak"
    batches = _listed(f"{one.batch} on {one.ranks} ranks" for one in points)
    raise ValueError(
        f"--scaling: a step has {batches} samples: give runs of one --train.batch-size (strong "
        "scaling), or of one for each rank (weak scaling)"
    )


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))


def _efficiency(one: Measured, base: Measured) -> float:
    return one.samples_per_s / one.ranks / (base.samples_per_s / base.ranks)


def _notes(points: Sequence[Measured], kind: str, samples: int, *, known: bool) -> list[str]:
    base = points[0]
    of, batch = ("of a rank ", base.batch // base.ranks) if kind == "weak" else ("", base.batch)
    notes = [
        f"{kind.capitalize()} scaling: the batch {of}has {batch:,} samples in all runs.",
        "Samples a second are those of all steps of a run's last job after the first "
        f"{WARMUP_STEPS}, without evaluations, saves and the start. Speed-up and efficiency are "
        f"relative to {base.run.label}, on {base.ranks} rank{'s' * (base.ranks > 1)}. Nothing is "
        "extrapolated.",
        f"Node hours are those of {'an epoch of ' * known}{samples:,} samples at this rate: hosts "
        "x hours.",
    ]
    if not known:
        notes[-1] += " The length of an epoch is not known, since no run has a checkpoint."
    return notes + [
        f"{one.run.label} did not complete: {one.run.status}."
        for one in points
        if one.run.summary["status"] != "completed"
    ]
