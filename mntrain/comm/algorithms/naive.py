"""Naive: every rank sends its tensor to every other rank and sums in rank order. The test oracle.

Each rank sends N - 1 messages of the whole tensor, whatever the verb (broadcast: only the root).
"""

from itertools import pairwise

import torch
from torch import Tensor

from mntrain.comm.engine import Steps
from mntrain.comm.mpi import Communicator, Requests
from mntrain.comm.resources import CommContext, TensorAccess, as_bytes
from mntrain.comm.ticket import Ticket
from zero.kernels import sum_dtype


def run(
    ticket: Ticket, access: TensorAccess, context: CommContext
) -> Steps[torch.cuda.Event | None]:
    """Run one call: the shortest correct implementation of the four verbs, on host memory."""
    access.begin()
    yield access.here
    call, tensor, comm = ticket.signature, access.host, context.comm
    tag = comm.tag(ticket.digest)
    if call.verb == "broadcast":
        data = as_bytes(tensor)
        if comm.rank != call.root:
            yield comm.receive(call.root, data, tag).test
        else:
            yield Requests.of(*(comm.send(peer, data, tag) for peer in _others(comm))).test
    elif call.verb == "all_gather":
        tensors = yield from _gather(comm, tensor, tag, ticket.ratio)
        for (low, high), owner in zip(
            pairwise(access.bounds), context.topology.owners, strict=True
        ):
            tensor[low:high].copy_(tensors[owner][low:high])
    else:  # a reduce-scatter leaves the sums of all shards on every rank
        dtype = call.wire or tensor.dtype
        ratio = ticket.ratio * tensor.element_size() / dtype.itemsize
        first, *others = yield from _gather(comm, tensor.to(dtype), tag, ratio)
        total = first.to(sum_dtype(tensor.dtype))
        for addend in others:  # torch.sum adds in another order
            total += addend
        tensor.copy_(total.to(dtype))
    return access.give_back()


def _gather(comm: Communicator, tensor: Tensor, tag: int, ratio: float) -> Steps[list[Tensor]]:
    """Return copies of every rank's tensor, by rank."""
    tensors = [tensor.clone() for _ in range(comm.size)]
    receives = [comm.receive(peer, as_bytes(tensors[peer]), tag) for peer in _others(comm)]
    sends = [comm.send(peer, as_bytes(tensor), tag, ratio=ratio) for peer in _others(comm)]
    yield Requests.of(*receives, *sends).test
    return tensors


def _others(comm: Communicator) -> list[int]:
    return [peer for peer in range(comm.size) if peer != comm.rank]
