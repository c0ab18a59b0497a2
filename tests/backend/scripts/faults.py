"""Mistakes and accidents, by name: every rank must end with an error that names it, or go on."""

import contextlib
import functools
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import mntrain.torch_backend


def averages(rank):
    """One rank asks for the mean, and one for the sum, whose messages are alike."""
    dist.all_reduce(torch.ones(4), dist.ReduceOp.AVG if rank else dist.ReduceOp.SUM)


def roots(rank):
    dist.reduce(torch.ones(4), dst=rank)


def never_sent(rank):
    if rank:
        time.sleep(60)
    else:
        dist.recv(torch.ones(3), 1)


def sender_gone(rank):
    if rank:
        sys.exit()
    dist.recv(torch.ones(3), 1)


def model(group=None):
    """DDP with a small model. Its reducer waits in C++, at the end of backward."""
    small = torch.nn.Linear(4, 4)
    return torch.nn.parallel.DistributedDataParallel(small, process_group=group, bucket_cap_mb=1e-6)


def train(model, steps=2):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()


def ddp_raises(rank):
    train(ddp := model())
    if rank:
        raise KeyError("a bug of rank one")
    train(ddp)


def ddp_differs(rank):
    train(ddp := model())
    if rank:
        dist.all_reduce(torch.ones(1))
    train(ddp)


def ddp_late(rank):
    _ = torch._dynamo.config  # DDP loads it, which may take longer than the group's time
    dist.barrier()
    ddp = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(4, 4), process_group=dist.new_group([0, 1], timeout=timedelta(seconds=3))
    )
    train(ddp)
    if rank:
        time.sleep(60)
    train(ddp)


def ddp_first_step_late(rank):
    """A static graph's first step starts all of its communication at the end of backward."""
    _ = torch._dynamo.config  # DDP loads it, which may take longer than the group's time
    dist.barrier()
    ddp = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(4, 4),
        process_group=dist.new_group([0, 1], timeout=timedelta(seconds=3)),
        static_graph=True,
    )
    if rank:
        time.sleep(60)
    train(ddp)


def ddp_uneven(rank):
    train(model(), 2 + rank)
    sys.exit()


def chain_differs(rank):
    """C++ waits for what follows a call, outside of any backward pass."""
    work = dist.all_reduce(torch.ones(4 + rank), async_op=True)
    work.get_future().then(lambda ended: ended.value()[0] + 1).wait()


def last_roots_of_a_group(rank):
    dist.broadcast(torch.ones(3), src=rank, group=dist.new_group([0, 1]))
    sys.exit()


def last_calls(rank):
    for _ in range(3 * (1 - rank)):  # one rank alone, as the root
        dist.broadcast(torch.ones(3), src=0)
    dist.destroy_process_group()
    sys.exit()


def send_rows(rank, sent, received):
    """Rank 0 sends rank 1 so many rows, and that receives so many."""
    rows = {0: ([1, sent], [1, 1]), 1: ([1, 1], [received, 1])}
    sends, receives = rows[rank]
    memory, whole = torch.zeros(9000, 2), torch.ones(sum(sends), 2)
    try:
        dist.all_to_all_single(memory[: sum(receives)], whole, receives, sends)
    finally:
        assert not memory[sum(receives) :].any()


def send_bytes(rank, sent, received):
    """Rank 1 sends so many bytes, and rank 0 receives so many."""
    tensor = torch.ones(sent if rank else received, dtype=torch.uint8)
    dist.send(tensor, 0) if rank else dist.recv(tensor, 1)


def refused(rank):
    """Calls with one error on both ranks, or on the one that receives; the group goes on."""
    wrong_tag = functools.partial(dist.send, torch.ones(3), 1 - rank, tag=-1)
    hooks = dist.BuiltinCommHookType
    in_cpp = functools.partial(model()._register_builtin_comm_hook, hooks.FP16_COMPRESS)
    tokens, waves = (torch.ones(3, dtype=kind) for kind in (torch.uint16, torch.complex64))
    flags = torch.ones(3, dtype=torch.bool)
    for call, ranks, said in (
        (lambda: dist.recv(torch.ones(3), 7), [0, 1], "rank 7 is not in a group of 2: give 0 to 1"),
        (lambda: dist.reduce(torch.ones(3), 7), [0, 1], "rank 7 is not in a group of 2"),
        (lambda: dist.gather(torch.ones(3), dst=7), [0, 1], "rank 7 is not in a group of 2"),
        (lambda: dist.all_reduce(tokens), [0, 1], "SUM takes no torch.uint16, with which torch"),
        (wrong_tag, [0, 1], "the tag of a message is -1: give one from 0 to"),
        (lambda: dist.all_reduce(flags, dist.ReduceOp.AVG), [0, 1], "AVG takes numbers, not torch"),
        (lambda: dist.reduce(waves, 0, dist.ReduceOp.MIN), [0, 1], "MIN takes numbers that have"),
        (in_cpp, [0, 1], "FP16_COMPRESS takes futures .*register_comm_hook"),
        (lambda: send_bytes(rank, 16, 12), [0], "16 bytes with tag 0, and this rank receives 12"),
        (lambda: send_bytes(rank, 9, 9), [], ""),
        (lambda: send_bytes(rank, 0, 1), [0], "0 bytes with tag 0, and this rank receives 1"),
        (lambda: send_rows(rank, 2, 3), [1], "has sent 16 bytes, and this rank receives 24"),
        (lambda: send_rows(rank, 0, 3), [1], "and this rank receives 24: their lists"),
        (lambda: send_rows(rank, 3, 2), [1], "has sent 24 bytes, and this rank receives 16"),
        (lambda: send_rows(rank, 3, 0), [1], "and this rank receives 0: their lists"),
        (lambda: send_rows(rank, 5000, 1), [1], "has sent 40000 bytes, and this rank receives 8"),
    ):
        error = pytest.raises((ValueError, RuntimeError), match=said)
        with error if rank in ranks else contextlib.nullcontext():
            call()
    dist.all_reduce(total := torch.ones(3))
    assert total[0] == 2
    gloo = dist.new_group(backend="gloo")
    for group, hook in ((None, hooks.ALLREDUCE), (gloo, hooks.FP16_COMPRESS)):
        hooked = model(group)
        hooked._register_builtin_comm_hook(hook)
        train(hooked)


def destroyed(rank):
    """One rank alone ends its group, and starts no other: no error."""
    dist.all_reduce(torch.ones(3))
    if rank:
        dist.destroy_process_group()
    sys.exit()


def workers(rank):
    """Data-loader workers, which import this script: no error."""
    del rank
    for context in ("spawn", "fork"):
        samples = TensorDataset(torch.arange(20.0))
        loader = DataLoader(samples, 4, num_workers=2, multiprocessing_context=context)
        total = sum(batch.sum() for (batch,) in loader)
        dist.all_reduce(total)
        assert total == 2 * 190


def late(rank):
    """A group whose time is shorter than that of all: an error."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    if rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(4), group=group)


def late_message(rank):
    """The same with a message."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    if rank == 1:
        time.sleep(60)
        dist.send(torch.ones(4), 0, group=group)
    else:
        dist.recv(torch.ones(4), 1, group=group)


def patient(rank):
    """A group whose time is longer than that of all: no error."""
    group = dist.new_group([0, 1], timeout=timedelta(minutes=2))
    if rank == 1:
        time.sleep(11)
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    assert tensor[0] == 2


def again(rank):
    """Groups that end and start, with a world beside them: no error."""
    del rank
    for members in ([1], [0, 1], [0]):  # torch gives all of them one name
        tensor = torch.ones(4)
        dist.all_reduce(tensor, group=dist.new_group([0, 1]))
        for _ in range(2):  # torch gives both one name
            group = dist.new_group([0, 1], use_local_synchronization=True)
            dist.all_reduce(torch.ones(4), group=group)
            dist.destroy_process_group(group)
        with mntrain.init(device="cpu") as world:
            assert world.sum(1.0) == tensor[0] == 2
        dist.new_group(members)
        dist.destroy_process_group()
        dist.init_process_group("mntrain")


def main(*names):
    dist.init_process_group("mntrain", timeout=timedelta(seconds=8))
    for name in names:
        globals()[name](dist.get_rank())
    dist.barrier()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
