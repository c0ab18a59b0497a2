"""The ranks' part of step.py: train one GPT in one way, and report."""

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
from gpt import Batch, data, gpt
from memory import Peak
from mpi4py import MPI
from ways import STAGES, WAYS, Way, alone, normed, own

import mntrain
from mntrain.bench.measure import rendezvous, turn_order

WARM_UP = 2
ALONE_AGAIN, NORMED = "bare torch, once more", "bare torch that takes the gradient's norm"


def main() -> None:
    """Train and say how long steps took, how much memory they needed, and what was learned."""
    options = argparse.ArgumentParser()
    options.add_argument("--what", choices=WAYS)
    options.add_argument("--solo", action="store_true", help="a world of one, beside bare torch")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--turns", type=int, default=5)
    given = options.parse_args()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    row: dict[str, Any] = {"what": given.what}
    if given.solo:
        row["ways"] = solo(given.steps)
    else:
        try:
            mine = measure(given.what, given.steps, given.turns)
        except AbsentError as reason:
            row["absent"] = str(reason)
        else:
            everyone = comm.gather(mine)
            if everyone is not None:
                row |= summary(everyone)
    row |= {
        "gradient_bytes": 4 * sum(p.numel() for p in gpt().parameters()),
        "versions": versions(["deepspeed", "horovod"]),
        "library": mpi_library(),
    }
    if comm.rank == 0:
        report(row)


def measure(what: str, steps: int, turns: int) -> dict[str, Any]:
    """What this rank sees of training in one way: alone, then by turns with bare computing."""
    group, make = WAYS[what]
    model, comm = gpt(), MPI.COMM_WORLD
    batches = list(data(comm.rank, WARM_UP + steps))
    with group() as context:
        comm.Barrier()
        peak = Peak()
        way = make(model, context)
        for batch in batches[:WARM_UP]:
            way.step(batch)
        sent = bytes_sent()
        for batch in batches[WARM_UP:]:
            loss = way.step(batch)
        sent = bytes_sent() - sent
        comm.Barrier()  # nobody's memory goes before all have looked
        found = {
            "sent_bytes": sent / steps,
            "peak_bytes": peak.bytes(),
            "shared_bytes": Peak.shared(),
            "loss": loss.item(),
            "settings": way.settings,
            "state": way.state() if way.state else None,
        }
        comm.Barrier()
        found |= by_turns(way, batches[WARM_UP:], turns)
        comm.Barrier()
        return found


def by_turns(way: Way, batches: Sequence[Batch], turns: int) -> dict[str, Any]:
    """Seconds a step, of this way and of as many ranks that only compute, a figure for every turn.

    A turn is a step on every batch, after one that is not counted: so what a way leaves for its
    next step is in the figures just once. The two are in turns, since a machine's speed changes.
    """
    both = {"step_s": way, "alone_s": alone(gpt(), None)}
    times: dict[str, list[float]] = {name: [] for name in both}
    clocks, counted = way.clocks or (lambda: (0.0, 0.0)), [0.0, 0.0]
    for number in range(turns):
        for name in reversed(both) if number % 2 else both:
            one = both[name]
            rendezvous(MPI.COMM_WORLD)
            one.step(batches[0])
            before, start = clocks(), time.perf_counter()
            for batch in batches:
                one.step(batch)
            times[name].append((time.perf_counter() - start) / len(batches))
            counted = [c + b - a for c, a, b in zip(counted, before, clocks(), strict=True)]
            if one.settle:
                one.settle()
    steps = turns * len(batches)
    waited_s, busy_s = (clock / steps if way.clocks else None for clock in counted)
    return {**times, "waited_s": waited_s, "busy_s": busy_s}


def summary(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of what all ranks saw: a turn takes as long as it takes the slowest."""
    clocks = everyone[0]["waited_s"] is not None
    return {
        **{
            name: [max(turn) for turn in zip(*(mine[name] for mine in everyone), strict=True)]
            for name in ("step_s", "alone_s")
        },
        "waited_s": max(mine["waited_s"] for mine in everyone) if clocks else None,
        "busy_s": max(mine["busy_s"] for mine in everyone) if clocks else None,
        "sent_bytes": max(mine["sent_bytes"] for mine in everyone),
        "peak_bytes": [mine["peak_bytes"] for mine in everyone],
        "shared_bytes": [mine["shared_bytes"] for mine in everyone],
        "loss": sum(mine["loss"] for mine in everyone) / len(everyone),
        "settings": everyone[0]["settings"],
        "state": [mine["state"] for mine in everyone] if everyone[0]["state"] else None,
    }


def solo(steps: int) -> dict[str, dict[str, Any]]:
    """A world of one, at every stage, beside a bare loop, by turns: seconds of every step.

    Every round takes a step of each, on the same batch, in an order of its own. A second bare loop
    shows what chance is, a third one what it takes to look at the gradient's norm, as mntrain does.
    """
    with mntrain.init(device="cpu") as world:
        ways = {"bare torch": alone(gpt(), None)}
        ways |= {f"mntrain stage {stage}": own(stage)(gpt(), world) for stage in STAGES}
        ways |= {NORMED: normed(gpt(), None), ALONE_AGAIN: alone(gpt(), None)}
        names = list(ways)
        times: dict[str, list[float]] = {name: [] for name in names}
        losses: dict[str, float] = {}
        for number, batch in enumerate(data(0, WARM_UP + steps)):
            for place in turn_order(len(names), number):
                name = names[place]
                start = time.perf_counter()
                loss = ways[name].step(batch)
                if number >= WARM_UP:
                    times[name].append(time.perf_counter() - start)
                losses[name] = loss.item()
    bare = times["bare torch"]
    return {
        name: {
            "step_s": taken,
            "median_s": statistics.median(taken),
            "ratio": statistics.median(a / b for a, b in zip(taken, bare, strict=True)),
            "loss": losses[name],
            "settings": ways[name].settings if name.startswith("mntrain") else "no world at all",
        }
        for name, taken in times.items()
    }


def bytes_sent() -> int:
    """What this node has put on its link so far, headers included."""
    _, found, figures = Path("/proc/net/dev").read_text().partition("eth0:")
    return int(figures.split()[8]) if found else 0  # after eight figures of receiving


if __name__ == "__main__":
    main()
