"""Computing, and as many bytes over plain sockets as gradients need: nothing is packed or added.

What no way over TCP can do without: the kernel's work, and the cores that it takes from computing.
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

PORTION_BYTES = 1 << 20  # that are handed to the kernel at once, and taken
BUFFER_BYTES = 1 << 19  # of the kernel: more than a link holds, and not so much that packets drop


class Ring(NamedTuple):
    """This rank's connections: to its like on the next node, and from that on the one before."""

    after: socket.socket
    before: socket.socket
    share: float  # of a gradient's bytes, which this rank sends and receives


@contextmanager
def ring() -> Iterator[Ring]:
    """Connections between nodes. AbsentError where ranks have no like on every node."""
    comm = MPI.COMM_WORLD
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    sizes = set(comm.allgather(node.size))
    nodes = comm.size // node.size
    if len(sizes) > 1 or nodes == 1:
        raise AbsentError("it is for several nodes of equal numbers of ranks")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        places = comm.allgather((socket.gethostbyname(socket.gethostname()), port))
        with socket.create_connection(places[(comm.rank + node.size) % comm.size]) as after:
            after.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            before, _ = server.accept()
            with before:
                yield Ring(after, before, 2 * (nodes - 1) / nodes / node.size)


class Line:
    """Bytes that go out and come in meanwhile, by a thread each way."""

    def __init__(self, ring: Ring, nbytes: int) -> None:
        self._ring = ring
        self._leaving, self._arriving = (memoryview(bytearray(nbytes)) for _ in range(2))
        self._portions: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._receives: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._arrived = threading.Semaphore(0)
        for work in (self._send, self._receive):
            threading.Thread(target=work, daemon=True).start()

    def expect(self) -> None:
        """Receive a gradient's bytes."""
        self._receives.put(len(self._arriving))

    def send(self, nbytes: int) -> None:
        """Send so many."""
        self._portions.put(nbytes)

    def wait(self) -> None:
        """Return when a gradient's bytes have arrived."""
        self._arrived.acquire()

    def _send(self) -> None:
        while True:
            self._ring.after.sendall(self._leaving[: self._portions.get()])

    def _receive(self) -> None:
        while True:
            left = self._receives.get()
            while left:
                room = self._arriving[: min(left, PORTION_BYTES)]
                left -= self._ring.before.recv_into(room, len(room), socket.MSG_WAITALL)
            self._arrived.release()


def exchanged(model: nn.Module, ring: Ring) -> Callable[[Batch], Tensor]:
    """A step in which backward's bytes leave as it makes them, and all have come at its end."""
    parameters = list(model.parameters())
    total = int(sum(p.numel() * p.element_size() for p in parameters) * ring.share)
    line, made, sent = Line(ring, total), 0.0, 0

    def count(parameter: nn.Parameter) -> None:
        nonlocal made, sent
        made += parameter.numel() * parameter.element_size() * ring.share
        if made - sent >= PORTION_BYTES:
            line.send(int(made) - sent)
            sent = int(made)

    class Waiting(torch.optim.AdamW):
        """Waits for the bytes before it updates."""

        def step(self) -> None:  # type: ignore[override]
            nonlocal made, sent
            line.send(total - sent)
            made, sent = 0.0, 0
            line.wait()
            super().step()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)
    step = plain_step(model, Waiting(parameters, **ADAMW))

    def exchange(batch: Batch) -> Tensor:
        line.expect()
        return step(batch)

    return exchange
