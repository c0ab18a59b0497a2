"""A job in which one rank fails while others wait for it, over gloo.

python -m torch.distributed.run --nproc-per-node 2 tests/torchrun/scripts/failing_rank.py raises
"""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import zero


def fail(kind):
    if kind == "raises":
        raise KeyError("a bug of rank one")
    if kind == "hangs":
        time.sleep(100)


def main():
    torch.set_num_threads(1)
    timeout = timedelta(seconds=15 if sys.argv[1] == "hangs" else 60)
    dist.init_process_group("gloo", timeout=timeout)
    model = nn.Linear(300, 300)
    optimizer = zero.ZeroOptimizer(model, torch.optim.SGD, zero.TorchCollectives(), stage=1, lr=0.1)
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            fail(sys.argv[1])
        try:
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
        except RuntimeError as error:
            print(f"rank {dist.get_rank()} in step {step}: {error}\n", end="", flush=True)
            time.sleep(1)  # torchrun ends the others as soon as one has failed
            raise
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
