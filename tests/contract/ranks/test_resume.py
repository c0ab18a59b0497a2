"""A user's own loop that is resumed by fewer ranks at another stage trains as if never stopped."""

import pytest
import torch
from mpi4py import MPI
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import mntrain
from contract.kits import Alone, Here
from contract.script import batches, loss_of, net

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
DATA = batches(6)


def make(kit):
    model = kit.ddp(net())
    optimizer = kit.optimizer(model, AdamW, lr=0.01)
    return model, optimizer, CosineAnnealingLR(optimizer, T_max=6)


def train_one(model, optimizer, scheduler, batch):
    loss_of(model, *batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def run(comm, stage, run_dir, until):
    """Resume from the run directory, and train until a step; give the first step and the model."""
    world = mntrain.init(comm, device="cpu", bucket_mb=2e-4, ranks_per_node=2)
    model, optimizer, scheduler = make(Here(world, stage))
    checkpoints = world.checkpoints(
        run_dir, model=model, optimizer=optimizer, scheduler=scheduler, every=2, keep=2
    )
    start = checkpoints.restore()
    for step, batch in enumerate(world.shard(DATA[start:until]), start + 1):
        train_one(model, optimizer, scheduler, batch)
        checkpoints.save(step)
    checkpoints.close()
    world.close()
    return start, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("stages", [(0, 2), (2, 1), (1, 0)])
def test_a_loop_resumed_on_another_number_of_ranks_continues(stages, tmp_path):
    run_dir = COMM.bcast(tmp_path / "run")
    first, second = stages
    start, _ = run(COMM, first, run_dir, until=5)  # the checkpoint is that of step 4
    assert start == 0
    fewer = COMM.Split(0 if COMM.rank < max(1, COMM.size - 1) else MPI.UNDEFINED)
    if fewer != MPI.COMM_NULL:
        start, parameters = run(fewer, second, run_dir, until=6)
        fewer.Free()
        assert start == 4
        model, *rest = make(Alone())
        for batch in DATA:
            train_one(model, *rest, batch)
        for ours, theirs in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-10)
    COMM.Barrier()
