"""Hooks that were written for DDP, unchanged, over a process group of torch beside the world."""

import pytest
import torch
import torch.distributed as dist
from cases import check_bits
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from worlds import RANKS, refusal

from zero.comm_hooks.ddp import DDPHook

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(RANKS == 1, reason="needs two ranks")]


@pytest.fixture(scope="module")
def group():
    comm = MPI.COMM_WORLD
    store = dist.TCPStore("localhost", 0, is_master=True) if comm.rank == 0 else None
    port = comm.bcast(store.port if store else None)
    store = store or dist.TCPStore("localhost", port)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    yield dist.group.WORLD
    dist.destroy_process_group()


def train(world, hook, stage=0):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20))
    optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1, comm_hook=hook, stage=stage)
    losses = []
    for step in range(6):
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step + 10 * world.rank))
        loss = functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.wait_for_parameters()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), losses


def test_a_hook_without_a_process_group_is_refused(worlds):
    world = worlds()
    assert "is not initialized: call torch.distributed.init_process_group" in refusal(
        train, world, DDPHook(None, default_hooks.allreduce_hook)
    )
    with pytest.raises(ValueError, match="DDPHook got a str as its hook"):
        DDPHook(None, "allreduce")


def test_a_process_group_of_another_size_is_refused(worlds, group):
    alone, *_ = [dist.new_group([rank]) for rank in range(RANKS)]
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=f"has 1 ranks, and this one {RANKS}"):
            DDPHook(alone, default_hooks.allreduce_hook).expect_size(RANKS)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(default_hooks.allreduce_hook, None), (default_hooks.bf16_compress_hook, "bf16")],
    ids=["allreduce", "bf16"],
)
def test_torchs_hooks_give_what_our_own_give(worlds, group, theirs, ours, stage):
    world = worlds(layout=1)
    weights, _ = train(world, DDPHook(group, theirs, overlap=True), stage)
    expected, _ = train(world, ours, stage)
    check_bits(world, [weights])
    if RANKS == 2:  # one sum, of halves
        assert torch.equal(weights, expected)
    else:
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-2 if ours else 1e-6)


def test_torchs_powersgd_trains(worlds, group):
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=1,
    )
    world = worlds(layout=1)
    weights, losses = train(world, DDPHook(state, powerSGD_hook.powerSGD_hook))
    check_bits(world, [weights])
    assert state.iter == 6
    assert state.total_numel_after_compression < 0.5 * state.total_numel_before_compression
    assert losses[-1] < losses[0]
