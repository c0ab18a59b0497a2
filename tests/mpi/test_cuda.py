"""CUDA tensors go the same way as host tensors; ranks share the GPUs that there are."""

import copy

import pytest
import torch
from torch import nn

import mntrain

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


@pytest.fixture(params=["flat", "leader", "lanes"])
def world(request):
    with mntrain.init(device="cuda", algorithm=request.param, ranks_per_node=2) as world:
        yield world


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_reduce_waits_for_the_stream_and_the_stream_waits_for_it(world, dtype):
    for numel in (1, 1001, 1_000_003):
        tensor = torch.zeros(numel, dtype=dtype, device=world.device)
        torch.cuda._sleep(50_000_000)  # the fill below has not happened when the call is made
        tensor.fill_(world.rank + 1)
        work = world.collectives.all_reduce(tensor)
        work.wait()
        doubled = tensor * 2  # on the current stream, with no other synchronisation
        expected = 2 * sum(range(1, world.size + 1))
        assert (doubled == expected).all()


def test_collectives_in_flight_together_keep_their_order(world):
    tensors = [torch.full((4099,), float(i), device=world.device) for i in range(50)]
    works = [world.collectives.all_reduce(tensor) for tensor in tensors]
    for i, (tensor, work) in reversed(list(enumerate(zip(tensors, works, strict=True)))):
        work.wait()
        assert (tensor == i * world.size).all()


def test_training_on_the_gpu_equals_training_on_the_cpu(world):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 3)
    ).double()
    alone = copy.deepcopy(model)
    alone[2].eval()
    model[2].eval()  # with its own statistics each rank would normalise differently
    batches = [torch.randn(13, 20, dtype=torch.float64) for _ in range(5)]
    model.to(world.device)
    ours = world.optimizer(model, torch.optim.AdamW, lr=1e-2, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for part, batch in zip(world.shard(batches), batches, strict=True):
        model(part.to(world.device)).square().mean().backward()
        ours.step()
        ours.zero_grad()
        alone(batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-6, atol=1e-8)
