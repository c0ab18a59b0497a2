"""Device memory of training is what the optimizer says, and does not grow."""

import gc
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import RANK
from torch import nn
from worlds import RANKS

from gpu.place import CUDA, device_memory, gpu, synchronize
from gpu.ranks.transports import transports
from zero.layout import MIB

pytestmark = [pytest.mark.mpi, *gpu]

WIDTH, LAYERS = (2048, 10) if CUDA else (256, 10)
ROWS = 4  # activations are nothing beside the weights
BUCKET_MB = 25 if CUDA else 0.5
# What the peak may hold besides: a gradient on its way into its bucket, with its weight's copy in
# cuBLAS's layout, and cuBLAS's workspace, which is 32 MiB on the largest GPUs.
SLACK = 2 * 4 * WIDTH * WIDTH + 64 * MIB
SHARE = 0.1
ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)  # no temporaries as large as its state
GROWTH = 8 * MIB  # of the host's memory, over twenty steps
PRECISIONS = [torch.float32, torch.bfloat16]


def deep(dtype, device):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*layers).to(device, dtype)


def train(model, optimizer, device, steps, micro_batches=1):
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        for turn in range(micro_batches):
            with nullcontext() if turn == micro_batches - 1 else optimizer.no_sync():
                inputs = torch.ones(ROWS, WIDTH, dtype=dtype, device=device)
                model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize()


def host_memory():
    """Bytes of the process, of which pinned memory is a part; and what torch has pinned."""
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    pinned = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return resident, pinned.get("allocated_bytes.current", 0)


@device_memory
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("dtype", PRECISIONS)
@transports
def test_the_peak_on_the_device_is_the_optimizers_and_little_more(worlds, transport, dtype, stage):
    world = worlds(transport, "lanes", 2, BUCKET_MB)
    gc.collect()
    synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = deep(dtype, world.device)
    optimizer = world.optimizer(model, ADAMW, stage=stage)
    train(model, optimizer, world.device, steps=3)
    taken = torch.cuda.max_memory_allocated() - before
    expected = optimizer.memory().total
    optimizer.close()
    assert taken <= (1 + SHARE) * expected + SLACK, f"{taken} bytes on rank {RANK}: {expected}"
    if RANKS > 1 and stage > 0:
        whole = sum(p.numel() for p in model.parameters()) * (16 if dtype == torch.float32 else 20)
        assert expected < 0.9 * whole


@pytest.mark.parametrize("stage", [0, 1, 2])
@transports
def test_nothing_grows_from_step_to_step(worlds, transport, stage):
    world = worlds(transport, "lanes", 2, BUCKET_MB)
    model = deep(torch.bfloat16, world.device)
    optimizer = world.optimizer(model, ADAMW, stage=stage, max_grad_norm=1.0)
    counts = []
    for steps in (5, 20):
        train(model, optimizer, world.device, steps, micro_batches=2)
        gc.collect()
        world.gather(RANK)  # all are here: nothing is under way
        allocated = torch.cuda.memory_allocated() if CUDA else 0
        counts.append((allocated, len(os.listdir("/proc/self/fd")), *host_memory()))
    optimizer.close()
    (allocated, files, resident, pinned), later = counts
    # An MPI that takes device memory may have one more message under way than before.
    assert later[0] <= allocated + (BUCKET_MB * 2**20 if transport == "cuda-aware" else 0)
    assert later[1] == files
    assert later[2] - resident < GROWTH
    assert later[3] == pinned
