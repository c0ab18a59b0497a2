"""The rank script of local_checkpoints.py: train in blocks of steps with and without saves."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and mntrain count the cores
import torch
from common import report, versions
from gpt import ADAMW, data, gpt, plain_step

import mntrain


def skip(checkpoints: Any, seconds: float) -> None:
    """Let time in which other blocks ran not count for the interval of one's own."""
    local = checkpoints._local
    local._interval._began += seconds
    local._cost._left = None


def main() -> None:
    """Train every way in every round, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of a block")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    with mntrain.init(device="cpu") as world:
        model = gpt(options.model)
        optimizer = world.optimizer(model, torch.optim.AdamW, stage=options.stage, **ADAMW)
        ways: dict[str, Any] = {"no saves": None}
        for every in (options.every, "auto"):
            ways[f"every {every}" if every != "auto" else "auto"] = world.checkpoints(
                options.folder / str(every),
                model=model,
                optimizer=optimizer,
                every=0,
                local=f"/dev/shm/mntrain-benchmark-{os.getuid()}",
                local_every=every,
            )
        for checkpoints in filter(None, ways.values()):
            checkpoints.restore()
        step, number = plain_step(model, optimizer), 0
        batches = data(world.rank, 10**9, options.model)
        turns, left = [], dict[str, float]()
        for round_ in range(1 + options.rounds):
            for name in list(ways)[:: -1 if round_ % 2 else 1]:
                world.sum(0.0)
                if ways[name]:
                    skip(ways[name], time.monotonic() - left.get(name, time.monotonic()))
                times, cpu = [], time.process_time()
                for _ in range(options.steps):
                    start, number = time.perf_counter(), number + 1
                    step(next(batches))
                    if ways[name]:
                        ways[name].save(number)
                    times.append(time.perf_counter() - start)
                left[name] = time.monotonic()
                own = (time.process_time() - cpu) / options.steps
                cpu_s = world.sum(own) / world.size
                turns.append({"what": name, "round": round_, "steps_s": times, "cpu_s": cpu_s})
        saves = {name: one.summary()["checkpoints"] for name, one in ways.items() if one}
        seconds = {
            name: one._local._cost._interval_s for name, one in ways.items() if name == "auto"
        }
        parameters = sum(p.numel() for p in model.parameters())
        if world.master:
            found = {"parameters": parameters, "turns": turns, "saves": saves, "auto": seconds}
            report({**found, "versions": versions()})


if __name__ == "__main__":
    main()
