"""Process groups of backend mntrain and another, by the device of a tensor.

    mpirun -n 3 python mixed_backends.py cpu cpu:gloo,cuda:mntrain=gloo
    mpirun -n 1 python mixed_backends.py cuda cpu:mntrain,cuda:nccl=nccl cpu:mntrain,cuda:nccl=nccl

The first word is the device of tensors. The others are given one after the other to groups that are
destroyed, and made again; behind `=` is the backend that must have served the tensors.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mntrain.torch_backend  # noqa: F401 - registers the backend
from mntrain.torch_backend.process_group import MpiProcessGroup
from mntrain.torch_backend.work import Call

# Older torch's names.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CLASSES = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL", "mntrain": "MpiProcessGroup"}


def check_verbs(served, group=None):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = torch.full((5,), float(rank + 1))
    work = dist.all_reduce(total, group=group, async_op=True)
    assert isinstance(work, Call) == (served == "mntrain"), work
    work.wait()
    assert total.tolist() == [size * (size + 1) / 2] * 5
    rows = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(rows, torch.full((3,), float(rank)), group=group)
    assert torch.stack(rows).mean(1).tolist() == [*map(float, range(size))]
    whole = torch.zeros(2 * size)
    gather_single(whole, torch.full((2,), float(rank)), group=group)
    assert whole[1::2].tolist() == [*map(float, range(size))]
    part = torch.zeros(2)
    scatter_single(part, torch.ones(2 * size), group=group)
    assert part.tolist() == [size] * 2
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.arange(size).float() + 10 * rank, group=group)
    assert swapped.tolist() == [rank + 10.0 * other for other in range(size)]
    values = torch.full((2,), float(rank))
    dist.broadcast(values, group_src=size - 1, group=group)
    assert values.tolist() == [size - 1] * 2
    dist.barrier(group)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": other} for other in range(size)]
    backend = dist.group.WORLD._get_backend(torch.empty(0).device)
    assert type(backend).__name__ == CLASSES[served]


def check_models():
    rank, size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
    ddp(torch.full((1, 3), float(rank))).sum().backward()
    assert ddp.module.weight.grad.flatten().tolist() == [(size - 1) / 2] * 6
    torch.manual_seed(0)
    whole = torch.nn.Linear(8, 4)
    expected = whole(torch.ones(1, 8))
    sharded = fully_shard(whole)
    found = sharded(torch.ones(1, 8))
    assert torch.equal(found, expected)
    found.sum().backward()


def check_messages():
    """Send around the ranks: these are always messages of mntrain."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(4)
    operations = [
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    works = dist.batch_isend_irecv(operations)
    assert all(isinstance(work, Call) for work in works)
    for work in works:
        work.wait()
    assert received.tolist() == [(rank - 1) % size] * 4


if sys.argv[1] == "cuda":
    torch.set_default_device("cuda:0")
for word in sys.argv[2:]:
    wanted, _, served = word.partition("=")
    dist.init_process_group(wanted)
    assert isinstance(dist.group.WORLD, MpiProcessGroup)
    check_verbs(served)
    members = [*range(min(2, dist.get_world_size()))]
    part = dist.new_group(members)
    if dist.get_rank() in members:
        check_verbs(served, part)
        dist.destroy_process_group(part)
    check_models()
    check_messages()
    print(f"served by {served} in {dist.get_backend()}\n", end="", flush=True)
    dist.destroy_process_group()
