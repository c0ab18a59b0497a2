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
from common import AbsentError, report, versions
from gpt import LARGE, MICRO_BATCH, MODELS, Batch, data, gpt
from memory import Peak
from mpi4py import MPI
from variants import VARIANTS, Variant, compute_only

from mntrain.bench.candidates import rendezvous

WARM_UP = 2
UNITS = "_s", "_cpu_s"  # of a clock, and of the processor


def main() -> None:
    """Train, and report step times, peak memory and the loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=VARIANTS, required=True)
    parser.add_argument("--model", choices=MODELS, default=LARGE)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=MICRO_BATCH, help="of a micro-batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    row: dict[str, Any] = {"what": options.what}
    try:
        local = measure(options)
    except AbsentError as reason:
        row["absent"] = str(reason)
    else:
        by_rank = comm.gather(local)
        if by_rank is not None:
            row |= summary(by_rank)
    nbytes = 4 * sum(p.numel() for p in gpt(options.model).parameters())
    row |= {"gradient_bytes": nbytes, "versions": versions(["deepspeed"])}
    if comm.rank == 0:
        report(row)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train one variant, then alternate it with compute only. Returns this rank's figures.

    The steps are rounded up to whole intervals between a variant's exchanges.
    """
    size, turns = options.model, options.turns
    group, make = VARIANTS[options.what]
    interval = int(options.what.partition(" every ")[2] or 1)
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
            "loss": loss.item(),
            "settings": variant.settings,
        }
        comm.Barrier()
        figures |= take_turns(variant, compute_only(gpt(size), None), batches[WARM_UP:], turns)
        comm.Barrier()
        return figures


def take_turns(
    variant: Variant, alone: Variant, batches: Sequence[Batch], turns: int
) -> dict[str, list[float]]:
    """Alternate the variant with compute only, and return their seconds per step for every turn.

    A turn is one step on every batch, after a step that is not timed: so communication that a step
    leaves to the next one is included once. CPU seconds are those of all threads of this rank.
    """
    both = {"step": variant, "alone": alone}
    times: dict[str, list[float]] = {f"{name}{unit}": [] for name in both for unit in UNITS}
    for number in range(turns):
        for name in reversed(both) if number % 2 else both:
            current = both[name]
            rendezvous(MPI.COMM_WORLD)
            current.step(batches[0])
            start, cpu_start = time.perf_counter(), time.process_time()
            for batch in batches:
                current.step(batch)
            seconds = time.perf_counter() - start, time.process_time() - cpu_start
            for unit, passed in zip(UNITS, seconds, strict=True):
                times[name + unit].append(passed / len(batches))
            if current.finish:
                current.finish()
    return times


def summary(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the figures of all ranks: times of the slowest rank, CPU seconds of the mean one."""
    found = dict(by_rank[0])
    of_all = {key: [local[key] for local in by_rank] for key in found}
    for name, combine in (("_s", max), ("_cpu_s", statistics.mean)):
        for key in ("step" + name, "alone" + name):
            found[key] = [combine(turn) for turn in zip(*of_all[key], strict=True)]
    sent, loss = max(of_all["sent_bytes"]), statistics.mean(of_all["loss"])
    return {**found, "sent_bytes": sent, "loss": loss, "peak_bytes": of_all["peak_bytes"]}


def bytes_sent() -> int:
    """Return the bytes that this node has sent over its link, headers included."""
    _, found, figures = Path("/proc/net/dev").read_text().partition("eth0:")
    return int(figures.split()[8]) if found else 0  # after eight columns of receiving


if __name__ == "__main__":
    main()
