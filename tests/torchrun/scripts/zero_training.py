"""`zero.ZeroOptimizer` over `zero.TorchCollectives`, beside DDP.

export PYTHONPATH=tests/helpers:tests/mpi
python -m torch.distributed.run --nproc-per-node 3 tests/torchrun/scripts/zero_training.py
mpirun -n 3 python tests/torchrun/scripts/zero_training.py      over backend mntrain
"""

import copy

import pytest
import torch
import torch.distributed as dist
from models import net
from oracle import (
    ADAMW,
    EXACT,
    MAX_NORM,
    STAGES,
    assert_close,
    loss_of,
    mine,
    samples,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import run_tests

import zero
from zero.comm_hooks.between_nodes import Int8Hook


def modes():
    return [{"stage": stage, "partition": partition} for stage, partition in STAGES]


def test_every_stage_equals_ddp(world):
    for mode in modes():
        model, group = net(), dist.new_group()
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        theirs = ADAMW(ddp.parameters())
        ours = world.optimizer(model, ADAMW, overlap_forward=True, **mode)
        for step in range(4):
            batch = mine(world, samples(12, step))
            loss_of(ddp, batch).backward()
            norm = nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)
            theirs.step()
            theirs.zero_grad()
            loss_of(model, batch).backward()
            torch.testing.assert_close(ours.clip_grad_norm_(MAX_NORM), norm, rtol=EXACT, atol=0)
            ours.step()
            ours.zero_grad()
        ours.wait_for_parameters()
        assert_close(model, ddp.module)


def test_ranks_with_different_optimizers_are_told_so(world):
    last = world.size - 1
    for model, options, words in [
        (nn.Linear(5, 3 + (world.rank == last)), {}, "tensor 0 differs .* rank 0 has weight"),
        (nn.Linear(5, 3), {"stage": int(world.rank == last)}, "stage differs .* rank 0 has 0,"),
        (nn.Linear(5, 3, bias=world.rank < last), {}, "tensor 1 differs .* bias .* has nothing"),
    ]:
        if world.size > 1:
            with pytest.raises(ValueError, match=words) as error:
                world.optimizer(model, ADAMW, **options)
            assert set(world.gather(str(error.value))) == {str(error.value)}


def test_what_needs_nodes_or_is_distributed_is_refused(world):
    if world.size > 1:
        with pytest.raises(ValueError, match=r"needs `levels`: world\.optimizer gives them"):
            world.optimizer(net(), ADAMW, comm_hook=Int8Hook())
    model = net()
    with pytest.raises(ValueError, match="leave out model="):
        zero.ZeroOptimizer(model, ADAMW, zero.TorchCollectives(), model=model)
    with pytest.raises(ValueError, match="model is wrapped in DistributedDataParallel"):
        world.optimizer(DistributedDataParallel(model), ADAMW)


if __name__ == "__main__":
    run_tests(globals())
