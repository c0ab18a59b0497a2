"""Cost of the comparison of weights over ranks: seconds of one, and its share of a step.

    mpirun -n 2 python benchmarks/weight_checks.py [--steps 20] [--every 100]

Trains the GPT of step.py at stages 0 to 2, compares the weights in every step, and takes the time
of these comparisons in the training thread. Prints a row for each stage: milliseconds of one, of
the rest of a step, and the share that one every so many steps has.
"""

import argparse
import statistics
import time

import torch
from ranks import gpt

import mntrain


def main() -> None:
    """Measure every stage, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=100)
    options = parser.parse_args()
    with mntrain.init() as world:
        world.print("stage  comparison, ms  step, ms  share of a step")
        for stage in (0, 1, 2):
            model = gpt.gpt().to(world.device)
            optimizer = world.optimizer(
                model, torch.optim.AdamW, **gpt.ADAMW, stage=stage, check_every=1
            )
            step, compared, others = gpt.plain_step(model, optimizer), [], []
            for batch in gpt.data(world.rank, options.steps):
                start, before = time.perf_counter(), optimizer.weight_checks[1]
                step(tuple(part.to(world.device) for part in batch)).item()
                compared.append(optimizer.weight_checks[1] - before)
                others.append(time.perf_counter() - start - compared[-1])
            one, rest = statistics.median(compared), statistics.median(others)
            share = one / options.every / rest
            world.print(f"{stage:>5}  {1e3 * one:14.2f}  {1e3 * rest:8.1f}  {share:.4%}")


if __name__ == "__main__":
    main()
