"""A rank of `benchmarks/exits.py`: train a little in an own loop, and end in one of several ways.

    mpirun -n 3 python benchmarks/ranks/exit_kinds.py KIND FOLDER

The last line of each rank is the time at which it was printed. Only `closed` closes its world.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import mntrain

KINDS = ("closed", "open", "sys.exit", "error", "two optimizers", "in flight", "stage 2", "saving")


def main(kind: str, folder: Path) -> None:
    """Take three steps, and end."""
    world = mntrain.init(device="cpu", ranks_per_node=1)
    options = {"in flight": {"stage": 1, "overlap_forward": True}, "stage 2": {"stage": 2}}
    torch.manual_seed(0)
    models = [make_model() for _ in range(1 + (kind == "two optimizers"))]
    optimizers = [world.optimizer(m, torch.optim.AdamW, **options.get(kind, {})) for m in models]
    if kind == "saving":
        given = {"model": models[0], "optimizer": optimizers[0], "every": 3}
        checkpoints = world.checkpoints(folder, **given)
        checkpoints.restore()
    for step in range(1, 4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if kind == "saving":
            checkpoints.save(step)
    if kind == "closed":
        world.close()
    print(f"end {time.time()}\n", end="", flush=True)  # in one piece
    if kind == "error" and world.rank == 1:
        raise KeyError("of one rank")
    if kind == "sys.exit":
        sys.exit(0)


def make_model() -> nn.Module:
    """Return a model of some layers."""
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
