"""CPU time that each rank spends on checks: comparing what ranks call, and watching for hangs.

    mpirun -n 4 python benchmarks/checks.py [--steps 200]

Trains a small model at stages 0 to 2 and counts the collectives of a step. Times the ticket by
which ranks compare one collective, in this process alone, and reads from the kernel the CPU time of
the watchdog's thread. Prints microseconds, and the share of a step of one second.
"""

import argparse
import threading
import time
from pathlib import Path

import torch
from torch import nn

import mntrain
from mntrain.comm.algorithms import AlgorithmChoice
from mntrain.comm.ticket import Signature, Ticket, call_site

REPEATS = 20_000


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    ticket_s = time_of_a_ticket()
    with mntrain.init(device="cpu", tune=False) as world:
        for stage in (0, 1, 2):
            collectives = train(world, stage, options.steps)
            if world.master:
                share = 100 * collectives * ticket_s
                print(
                    f"stage {stage}: {collectives:.1f} collectives a step x {1e6 * ticket_s:.1f} us"
                    f" = {1e6 * collectives * ticket_s:.0f} us, {share:.4f} % of a step of 1 s"
                )
        start, used = time.monotonic(), watchdog_s()
        world.barrier()
        time.sleep(10)
        world.barrier()
        share = (watchdog_s() - used) / (time.monotonic() - start)
        shares = world.gather(share)
    if world.master:
        print(f"watchdog's thread: {100 * max(shares):.3f} % of the time, on the busiest rank")


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


def watchdog_s() -> float:
    """Return the CPU seconds of the watchdog's thread so far."""
    thread = next(t for t in threading.enumerate() if t.name == "mntrain watchdog")
    path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
    return int(path.read_text().split()[0]) / 1e9


if __name__ == "__main__":
    main()
