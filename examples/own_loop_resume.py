"""An example of a custom loop that is resumed: mpirun -np 4 python examples/own_loop_resume.py DIR.

Run it again, with any number of ranks and any stage, after it was stopped or killed.
"""

import argparse
import sys

import torch
from torch import nn

import mntrain

parser = argparse.ArgumentParser()
parser.add_argument("run_dir")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--every", default="1min", help="steps, minutes or auto")
options = parser.parse_args()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the global batch of a step: 64 points, and the quadrants that they lie in."""
    points = torch.randn(64, 2, generator=torch.Generator().manual_seed(step))
    return points, 2 * (points[:, 0] > 0) + (points[:, 1] > 0)


with mntrain.init() as world:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 4)).to(world.device)
    optimizer = world.optimizer(model, torch.optim.AdamW, lr=1e-2, stage=options.stage)
    torch.manual_seed(world.rank)  # from here on, ranks draw unlike numbers, as for dropout
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=options.steps)
    checkpoints = world.checkpoints(
        options.run_dir, model=model, optimizer=optimizer, scheduler=scheduler, every=options.every
    )
    with world.metrics(options.run_dir, config=vars(options)) as metrics:
        done = checkpoints.restore()  # the number of steps taken, 0 in a new run
        batches = (batch(step) for step in range(done + 1, options.steps + 1))
        stop = False
        for step, (points, quadrants) in enumerate(world.shard(batches), start=done + 1):
            outputs = model(points.to(world.device))
            loss = nn.functional.cross_entropy(outputs, quadrants.to(world.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            metrics.log(step, weight=len(points), loss=loss, lr=scheduler.get_last_lr()[0])
            scheduler.step()
            stop = world.stop_requested()  # a signal, or the end of the allocation
            checkpoints.save(step, now=stop or step == options.steps)
            if stop:
                break
sys.exit(75 if stop else 0)  # 75: run it again
