"""A training step that sends as many bytes as an all-reduce over raw sockets, without using them.

It measures the cost that no communication over TCP can avoid: the kernel's work, and the CPU time
that it takes from computation.
"""

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from common import AbsentError
from gpt import ADAMW, Batch, plain_step
from mpi4py import MPI
from torch import Tensor, nn

PORTION_BYTES = 1 << 20  # of one send or receive call
BUFFER_BYTES = (
    1 << 19
)  # in the kernel: more than the link buffers, but few enough that no packets drop


class Ring(NamedTuple):
    """Connections to the same local rank on the next node, and from it on the previous node."""

    after: socket.socket
    before: socket.socket
    share: float  # of the gradient's bytes that this rank sends and receives


@contextmanager
def ring() -> Iterator[Ring]:
    """Connect the nodes in a ring. Raises AbsentError if nodes have different numbers of ranks."""
    comm = MPI.COMM_WORLD
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    sizes = set(comm.allgather(node.size))
    nodes = comm.size // node.size
    if len(sizes) > 1 or nodes == 1:
        raise AbsentError("it needs several nodes with equal numbers of ranks")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        places = comm.allgather((socket.gethostbyname(socket.gethostname()), port))
        with socket.create_connection(places[(comm.rank + node.size) % comm.size]) as after:
            after.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            before, _ = server.accept()
            with before:
                yield Ring(after, before, 2 * (nodes - 1) / nodes / node.size)


class Exchange:
    """A sending and a receiving thread."""

    def __init__(self, ring: Ring, nbytes: int) -> None:
        self._ring = ring
        self._outgoing, self._incoming = (memoryview(bytearray(nbytes)) for _ in range(2))
        self._portions: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._receives: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._arrived = threading.Semaphore(0)
        for work in (self._send, self._receive):
            threading.Thread(target=work, daemon=True).start()

    def expect(self) -> None:
        """Start receiving a gradient's bytes."""
        self._receives.put(len(self._incoming))

    def send(self, nbytes: int) -> None:
        """Start sending `nbytes` bytes."""
        self._portions.put(nbytes)

    def wait(self) -> None:
        """Wait for a gradient's bytes."""
        self._arrived.acquire()

    def _send(self) -> None:
        while True:
            self._ring.after.sendall(self._outgoing[: self._portions.get()])

    def _receive(self) -> None:
        while True:
            left = self._receives.get()
            while left:
                part = self._incoming[: min(left, PORTION_BYTES)]
                left -= self._ring.before.recv_into(part, len(part), socket.MSG_WAITALL)
            self._arrived.release()


def exchanged(model: nn.Module, ring: Ring) -> Callable[[Batch], Tensor]:
    """Return a step that sends bytes as backward produces gradients."""
    parameters = list(model.parameters())
    total = int(sum(p.numel() * p.element_size() for p in parameters) * ring.share)
    sockets, ready, sent = Exchange(ring, total), 0.0, 0

    def count(parameter: nn.Parameter) -> None:
        nonlocal ready, sent
        ready += parameter.numel() * parameter.element_size() * ring.share
        if ready - sent >= PORTION_BYTES:
            sockets.send(int(ready) - sent)
            sent = int(ready)

    class WaitingAdamW(torch.optim.AdamW):
        """AdamW that waits for all bytes before its update."""

        def step(self) -> None:  # type: ignore[override]
            nonlocal ready, sent
            sockets.send(total - sent)
            ready, sent = 0.0, 0
            sockets.wait()
            super().step()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)
    step = plain_step(model, WaitingAdamW(parameters, **ADAMW))

    def exchange(batch: Batch) -> Tensor:
        sockets.expect()
        return step(batch)

    return exchange
