"""Disturb a healthy job at random for a long time: the watchdog must not end it.

    mpirun -n 3 python benchmarks/soak.py [--minutes 60] [--timeout 30] [--seed 0]

In about every tenth step one rank, the same choice on all, is slow, is stopped and continued as by
a debugger, holds the interpreter in C code, or collects garbage, each for up to half of the time
limit; or all ranks save a checkpoint. Ranks are warned of after a sixth of the limit. Prints one
line with the number of disturbances of each kind and the longest; a job that is ended prints none.
"""

import argparse
import ctypes
import gc
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable

import option_types
import torch
from torch import nn

import mntrain

CHANCE = 0.1  # of a disturbance in a step
STEP_S = 0.2  # of a step without one


def main() -> None:
    """Train until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=option_types.positive, default=60.0)
    parser.add_argument("--timeout", type=option_types.positive, default=30.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    limit, chance = options.timeout, random.Random(options.seed)
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    longest, steps = 0.0, 0
    with (
        mntrain.init(device="cpu", timeout=limit, warn_after=limit / 6) as world,
        tempfile.TemporaryDirectory() as folder,
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        optimizer = world.optimizer(model, torch.optim.AdamW, stage=2)
        checkpoints = world.checkpoints(folder, model=model, optimizer=optimizer, every=10**9)
        checkpoints.restore()
        while not world.stop_requested(max_minutes=options.minutes):
            steps += 1
            time.sleep(STEP_S)
            kind, rank = chance.choice([*DISTURBANCES, "save"]), chance.randrange(world.size)
            pause_s = chance.uniform(0, limit / 2)
            if chance.random() < CHANCE:
                counts[kind] += 1
                if kind == "save":
                    checkpoints.save(steps)
                else:
                    seconds[kind] += pause_s
                    longest = max(longest, pause_s)
                    if world.rank == rank:
                        DISTURBANCES[kind](pause_s)
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if world.master:
            kinds = ", ".join(
                f"{count} x {kind} ({seconds[kind] / count:.1f} s)"
                if seconds[kind]
                else f"{count} x {kind}"
                for kind, count in sorted(counts.items())
            )
            print(
                f"{options.minutes:g} minutes, {world.size} ranks, {steps} steps, limit {limit:g} "
                f"s: {kinds}; longest {longest:.1f} s; the job was not ended"
            )


def stop(seconds: float) -> None:
    """Stop this process; a child lets it go on."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)
    os.waitpid(child, 0)


def hold(seconds: float) -> None:
    """Spend time in C code that keeps the interpreter."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))


def compute(seconds: float) -> None:
    """Compute in Python."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        gc.collect()


DISTURBANCES: dict[str, Callable[[float], None]] = {
    "slow": time.sleep,
    "stopped": stop,
    "held": hold,
    "computes": compute,
}

if __name__ == "__main__":
    main()
