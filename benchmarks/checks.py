"""CPU time that each rank spends on checks: comparing what ranks call, watching, and recording.

    mpirun -n 4 python benchmarks/checks.py [--steps 200]

Trains a small model at stages 0 to 2 and counts the collectives of a step. Times the ticket by
which ranks compare one collective, and its two events in the recorder, in this process alone. While
the model trains on, reads from the kernel the CPU time of the threads of the watchdog, which also
sends the heartbeats, and of the recorder. Prints microseconds, and the share of a step of one
second.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

import mntrain
from mntrain.comm.algorithms import AlgorithmChoice
from mntrain.comm.ticket import Signature, Ticket, call_site

REPEATS = 20_000
THREADS = ("watchdog", "recorder")
WATCH_S = 20  # seconds of training during which the threads are watched


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    with (
        mntrain.init(device="cpu") as world,
        tempfile.TemporaryDirectory() as folder,
    ):
        if problem := world.recorder.open(Path(folder), "checks"):
            raise SystemExit(problem)
        ticket_s, events_s = time_of_a_ticket(), time_of_events(world)
        for stage in (0, 1, 2):
            collectives = train(world, stage, options.steps)
            if world.master:
                each_s = ticket_s + events_s
                print(
                    f"stage {stage}: {collectives:.1f} collectives a step x ({1e6 * ticket_s:.1f}"
                    f" us for the ticket + {1e6 * events_s:.1f} us for the events) ="
                    f" {1e6 * collectives * each_s:.0f} us,"
                    f" {100 * collectives * each_s:.4f} % of a step of 1 s"
                )
        shares = world.gather(shares_of_threads(world, options.steps))
    if world.master:
        for thread in THREADS:
            busiest = max(share[thread] for share in shares)
            print(f"{thread}'s thread: {100 * busiest:.3f} % of the time, on the busiest rank")


def train(world: mntrain.World, stage: int, steps: int) -> float:
    """Return how many collectives an optimizer begins in a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = world.optimizer(model, torch.optim.AdamW, stage=stage, max_grad_norm=1.0)
    stream = world.collectives._engine.streams[-1]
    before = stream.begun
    for _ in range(steps):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait_for_parameters()
    return (stream.begun - before) / steps


def time_of_a_ticket() -> float:
    """Return the seconds that one collective's signature, call site and digest take."""
    choice, digest = AlgorithmChoice("lanes"), 1
    start = time.perf_counter()
    for number in range(REPEATS):
        bounds = (0, 1_000_000)
        signature = Signature(
            "all_reduce", "gradient bucket 0", torch.float32, bounds, choice=choice
        )
        ticket = Ticket(signature, call_site())
        ticket.begin(number, digest)
        digest = ticket.digest
    return (time.perf_counter() - start) / REPEATS


def time_of_events(world: mntrain.World) -> float:
    """Return the seconds that recording the beginning and the end of a collective takes."""
    site = call_site()
    start = time.perf_counter()
    for number in range(REPEATS):
        world.recorder.collective_begins("checks", number, "all_reduce", site)
        world.recorder.collective_ends("checks", number)
    return (time.perf_counter() - start) / REPEATS


def shares_of_threads(world: mntrain.World, steps: int) -> dict[str, float]:
    """Train for a while, and return the share of the time that each thread used a core."""
    before, start = {thread: cpu_s(thread) for thread in THREADS}, time.monotonic()
    while world.gather(time.monotonic() - start)[0] < WATCH_S:
        train(world, 1, steps)
    taken_s = time.monotonic() - start
    return {thread: (cpu_s(thread) - before[thread]) / taken_s for thread in THREADS}


def cpu_s(name: str) -> float:
    """Return the CPU seconds of a thread of the library so far."""
    thread = next(t for t in threading.enumerate() if t.name == f"mntrain {name}")
    path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
    return int(path.read_text().split()[0]) / 1e9


if __name__ == "__main__":
    main()
