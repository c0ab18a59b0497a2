"""Calls that fail while C++ waits for their futures, many times: each wait ends with the error.

mpirun -n 1 python waits_in_cpp.py 30
"""

import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mntrain.torch_backend  # noqa: F401 - registers the backend
from mntrain.comm.engine import ProgressEngine
from mntrain.torch_backend.work import Call
from zero.collectives import CompletedWork


class LostError(RuntimeError):
    """The error of a call."""


ENGINE = ProgressEngine()


def failing_call(tensor, fails=True):
    """Return a call that ends with an error a moment after the wait for it has begun."""
    due = time.monotonic() + 1e-3

    def steps():
        yield lambda: time.monotonic() > due
        if fails:
            raise LostError("a rank is lost")
        return CompletedWork()

    return Call([ENGINE.submit(steps())], [tensor])


class Checkpointed(torch.nn.Linear):
    def forward(self, values):
        return checkpoint(super().forward, values, use_reentrant=True)


def in_ddp(kind=torch.nn.Linear, follow=lambda future: future, fails=True, **options):
    """Return a step of DDP whose communication hook makes such a call."""

    def step():
        model = DistributedDataParallel(kind(3, 2), **options)
        model.register_comm_hook(None, hook)
        model(torch.ones(1, 3, requires_grad=True)).sum().backward()
        assert not fails

    def hook(_, bucket) -> torch.futures.Future[torch.Tensor]:
        return follow(failing_call(bucket.buffer(), fails).get_future())

    return step


def first_of(future):
    return future.then(lambda ended: ended.value()[0])


def of_future(wait):
    return lambda: wait(failing_call(torch.ones(3)).get_future())


def wait_in_a_thread(future):
    """Wait in a thread that is not the main one."""
    raised = []

    def wait():
        try:
            future.wait()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    raise raised[0]


# What a wait in Python raises is the error itself; C++ makes it a RuntimeError with its text.
WAYS = {
    "work.wait": (lambda: failing_call(torch.ones(3)).wait(), LostError),
    "DDP": (in_ddp(), LostError),
    "DDP, a chain": (in_ddp(follow=first_of), LostError),
    "DDP, unused": (in_ddp(find_unused_parameters=True), LostError),
    "DDP, static": (in_ddp(static_graph=True), RuntimeError),
    "DDP, checkpointed": (in_ddp(Checkpointed), RuntimeError),
    "wait": (of_future(lambda future: future.wait()), RuntimeError),
    "then": (of_future(lambda future: first_of(future).wait()), RuntimeError),
    "wait_all": (of_future(lambda future: torch.futures.wait_all([future])), RuntimeError),
    "thread": (of_future(wait_in_a_thread), RuntimeError),
}


def main(rounds):
    dist.init_process_group("mntrain")
    for name, (way, kind) in WAYS.items():
        for _ in range(rounds):
            with pytest.raises(RuntimeError, match="a rank is lost") as raised:
                way()
            assert raised.type is kind, name
            assert ENGINE.awaited() is None
    in_ddp(fails=False, follow=first_of)()
    in_ddp(fails=False, follow=first_of, static_graph=True)()
    print(f"{len(WAYS)} ways, {rounds} times", flush=True)


main(int(sys.argv[1]))
