"""The rank script of step.py: train a GPT in one variant, print one JSON object."""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and mntrain count the cores
import torch
from common import AbsentError, mpi_library, report, versions
from gpt import LARGE, MICRO_BATCH, MODELS, Batch, data, gpt
from memory import Peak
from mpi4py import MPI
from variants import (
    INTERVALS,
    STAGES,
    VARIANTS,
    Variant,
    compute_only,
    compute_with_norm,
    mntrain_stage,
)

import mntrain
from mntrain.bench.candidates import rendezvous, turn_order

WARM_UP = 2
UNITS = "_s", "_cpu_s"  # of a clock, and of the processor


def main() -> None:
    """Train, and report step times, peak memory and the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=VARIANTS)
    parser.add_argument("--solo", action="store_true", help="a single process and plain torch")
    parser.add_argument("--model", choices=MODELS, default=LARGE)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=MICRO_BATCH, help="of a micro-batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    row: dict[str, Any] = {"what": options.what}
    if options.solo:
        row["ways"] = solo(options.steps)
    else:
        try:
            local = measure(options)
        except AbsentError as reason:
            row["absent"] = str(reason)
        else:
            by_rank = comm.gather(local)
            if by_rank is not None:
                row |= summary(by_rank)
    row |= {
        "gradient_bytes": 4 * sum(p.numel() for p in gpt(options.model).parameters()),
        "versions": versions(["deepspeed", "horovod"]),
        "library": mpi_library(),
    }
    if comm.rank == 0:
        report(row)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train one variant, then alternate it with compute only. Returns this rank's figures.

    The steps are rounded up to whole intervals between a variant's exchanges.
    """
    size, turns = options.model, options.turns
    group, make = VARIANTS[options.what]
    interval = INTERVALS.get(options.what, 1)
    steps = -(-options.steps // interval) * interval
    model, comm = gpt(size), MPI.COMM_WORLD
    batches = list(data(comm.rank, WARM_UP + steps, size, options.sequences))
    with group() as context:
        comm.Barrier()
        peak = Peak()
        variant = make(model, context)
        for batch in batches[:WARM_UP]:
            variant.step(batch)
        sent = bytes_sent()
        for batch in batches[WARM_UP:]:
            loss = variant.step(batch)
        sent = bytes_sent() - sent
        comm.Barrier()  # no rank frees memory before all have measured it
        figures = {
            "steps": steps,
            "sent_bytes": sent / steps,
            "peak_bytes": peak.bytes(),
            "shared_bytes": Peak.shared(),
            "loss": loss.item(),
            "settings": variant.settings,
            "state": variant.state() if variant.state else None,
        }
        comm.Barrier()
        figures |= take_turns(variant, compute_only(gpt(size), None), batches[WARM_UP:], turns)
        comm.Barrier()
        return figures


def take_turns(
    variant: Variant, alone: Variant, batches: Sequence[Batch], turns: int
) -> dict[str, Any]:
    """Alternate the variant with compute only, and return their seconds per step for every turn.

    A turn is one step on every batch, after a step that is not timed: so communication that a step
    leaves to the next one is included once. CPU seconds are those of all threads of this rank.
    """
    both = {"step": variant, "alone": alone}
    times: dict[str, list[float]] = {f"{name}{unit}": [] for name in both for unit in UNITS}
    clocks, totals = variant.clocks or (lambda: (0.0, 0.0)), [0.0, 0.0]
    for number in range(turns):
        for name in reversed(both) if number % 2 else both:
            current = both[name]
            rendezvous(MPI.COMM_WORLD)
            current.step(batches[0])
            before, start, cpu_start = clocks(), time.perf_counter(), time.process_time()
            for batch in batches:
                current.step(batch)
            seconds = time.perf_counter() - start, time.process_time() - cpu_start
            for unit, passed in zip(UNITS, seconds, strict=True):
                times[name + unit].append(passed / len(batches))
            totals = [c + b - a for c, a, b in zip(totals, before, clocks(), strict=True)]
            if current.finish:
                current.finish()
    steps = turns * len(batches)
    waited_s, busy_s = (total / steps if variant.clocks else None for total in totals)
    return {**times, "waited_s": waited_s, "busy_s": busy_s}


def summary(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the figures of all ranks: times of the slowest rank, CPU seconds of the mean one."""
    first = by_rank[0]

    def largest(key: str) -> float | None:
        return None if first[key] is None else max(local[key] for local in by_rank)

    return {
        **{
            key: [max(turn) for turn in zip(*(local[key] for local in by_rank), strict=True)]
            for key in ("step_s", "alone_s")
        },
        **{
            key: [statistics.mean(turn) for turn in zip(*(it[key] for it in by_rank), strict=True)]
            for key in ("step_cpu_s", "alone_cpu_s")
        },
        **{key: largest(key) for key in ("waited_s", "busy_s", "sent_bytes")},
        **{key: [local[key] for local in by_rank] for key in ("peak_bytes", "shared_bytes")},
        "loss": sum(local["loss"] for local in by_rank) / len(by_rank),
        "settings": first["settings"],
        "steps": first["steps"],
        "state": [local["state"] for local in by_rank] if first["state"] else None,
    }


def solo(steps: int) -> dict[str, dict[str, Any]]:
    """Train every stage in a single process, in turns with plain torch loops.

    Every round takes one step of each on the same batch, in random order. A second plain loop shows
    the noise; a third one computes the gradient norm, as mntrain does.
    """
    with mntrain.init(device="cpu") as world:
        variants = {"plain torch": compute_only(gpt(), None)}
        variants |= {
            f"mntrain stage {stage}": mntrain_stage(stage)(gpt(), world) for stage in STAGES
        }
        variants["plain torch with the gradient norm"] = compute_with_norm(gpt(), None)
        variants["plain torch, repeated"] = compute_only(gpt(), None)
        names = list(variants)
        times: dict[str, list[float]] = {name: [] for name in names}
        losses: dict[str, float] = {}
        for number, batch in enumerate(data(0, WARM_UP + steps)):
            for index in turn_order(len(names), number):
                name = names[index]
                start = time.perf_counter()
                loss = variants[name].step(batch)
                if number >= WARM_UP:
                    times[name].append(time.perf_counter() - start)
                losses[name] = loss.item()
    plain = times["plain torch"]
    return {
        name: {
            "step_s": taken,
            "median_s": statistics.median(taken),
            "ratio": statistics.median(a / b for a, b in zip(taken, plain, strict=True)),
            "loss": losses[name],
            "settings": variants[name].settings if name.startswith("mntrain") else "plain loop",
        }
        for name, taken in times.items()
    }


def bytes_sent() -> int:
    """Return the bytes that this node has sent over its link, headers included."""
    _, found, figures = Path("/proc/net/dev").read_text().partition("eth0:")
    return int(figures.split()[8]) if found else 0  # after eight columns of receiving


if __name__ == "__main__":
    main()
