"""The cost of recording a timeline: training steps with and without one, in turns.

    mpirun -n 4 python benchmarks/timeline.py [--ranks-per-node 2] [--steps 20] [--turns 15]

Trains a GPT of benchmarks/ranks/gpt.py. Prints, by the clock of rank 0, the medians over turns of a
step's time in each way and of their ratio, and what the begin and the end of a timeline take.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and mntrain count the cores
sys.path.insert(0, str(Path(__file__).parent / "ranks"))

import torch
from gpt import ADAMW, LARGE, MODELS, data, gpt, plain_step

import mntrain

WARM_UP = 3


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks-per-node", type=int)
    parser.add_argument("--model", choices=MODELS, default=LARGE)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="of a turn in each way")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    with (
        mntrain.init(device="cpu", ranks_per_node=options.ranks_per_node) as world,
        tempfile.TemporaryDirectory() as folder,
    ):
        model, path = gpt(options.model), Path(folder, "trace.json.gz")
        optimizer = world.optimizer(model, torch.optim.AdamW, stage=options.stage, **ADAMW)
        step = plain_step(model, optimizer)
        batches = list(data(world.rank, options.steps, options.model))

        def steps_s() -> float:
            """Return the seconds of a step."""
            world.barrier()
            start = time.perf_counter()
            for batch in batches:
                step(batch)
            return (time.perf_counter() - start) / len(batches)

        for batch in batches[:WARM_UP]:
            step(batch)
        off, on, begin, end = [], [], [], []
        for turn in range(options.turns):
            ways = [off, on] if turn % 2 else [on, off]
            for way in ways:
                if way is off:
                    off.append(steps_s())
                    continue
                start = time.perf_counter()
                with world.timeline(path):
                    begin.append(time.perf_counter() - start)
                    on.append(steps_s())
                    start = time.perf_counter()
                end.append(time.perf_counter() - start)
        ratio = statistics.median(one / other for one, other in zip(on, off, strict=True))
        off_s, on_s, begin_s, end_s = map(statistics.median, (off, on, begin, end))
        nbytes = path.stat().st_size if world.master else 0
        world.print(
            f"a step takes {1e3 * off_s:.2f} ms, and {1e3 * on_s:.2f} ms with a timeline: "
            f"{100 * (ratio - 1):+.2f} % in the median turn\n"
            f"begin {1e3 * begin_s:.0f} ms, end {1e3 * end_s:.0f} ms, "
            f"{nbytes / options.steps / world.size / 1e3:.1f} kB a step and rank"
        )


if __name__ == "__main__":
    main()
