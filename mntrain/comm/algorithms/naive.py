"""Naive: every rank sends its whole tensor to every other and sums in rank order. The test oracle.

Each rank sends N - 1 messages of the whole tensor, whatever the verb (broadcast: only the root).
"""

from itertools import pairwise

from torch import Tensor

from mntrain.comm.buffers import as_bytes
from mntrain.comm.collective_call import (
    Algorithm,
    CollectiveCall,
    SingleChunkOperation,
    WorldContext,
)
from mntrain.comm.intranode import CommContext
from mntrain.comm.mpi import Requests
from mntrain.comm.pending import Operation, Steps
from mntrain.comm.staging import TensorAccess
from zero.collectives import Work
from zero.kernels import sum_dtype

AUTO = False


def make(world: WorldContext) -> Algorithm:
    """Return the algorithm for a world."""
    return NaiveAlgorithm(world)


class NaiveAlgorithm:
    """The shortest correct implementation of the four verbs, on host memory."""

    host_only = True

    def __init__(self, world: WorldContext) -> None:
        self._world, self._comm = world, world.comm
        self._others = [peer for peer in range(world.comm.size) if peer != world.comm.rank]

    def operation(
        self, call: CollectiveCall, access: TensorAccess, context: CommContext
    ) -> Operation[Work]:
        """Implement `Algorithm.operation` as one chunk."""
        steps = {"broadcast": self._broadcast, "all_gather": self._all_gather}.get(
            call.verb, self._sum
        )
        return SingleChunkOperation(self._world, call, access, steps)

    def _sum(self, call: CollectiveCall, tensor: Tensor, tag: int) -> Steps[None]:
        """All-reduce; also reduce-scatter, in which every rank ends with all shards."""
        dtype = call.wire or tensor.dtype
        first, *others = yield from self._gather(tensor.to(dtype), tag)
        total = first.to(sum_dtype(tensor.dtype))
        for addend in others:  # torch.sum adds in another order
            total += addend
        tensor.copy_(total.to(dtype))

    def _all_gather(self, call: CollectiveCall, tensor: Tensor, tag: int) -> Steps[None]:
        tensors = yield from self._gather(tensor, tag)
        for (low, high), owner in zip(pairwise(call.bounds), self._world.owners, strict=True):
            tensor[low:high].copy_(tensors[owner][low:high])

    def _broadcast(self, call: CollectiveCall, tensor: Tensor, tag: int) -> Steps[None]:
        data = as_bytes(tensor)
        if self._comm.rank == call.root:
            yield Requests.of(*(self._comm.send(peer, data, tag) for peer in self._others)).test
        else:
            yield self._comm.receive(call.root, data, tag).test

    def _gather(self, tensor: Tensor, tag: int) -> Steps[list[Tensor]]:
        """Return copies of every rank's tensor, by rank."""
        tensors = [tensor.clone() for _ in range(self._comm.size)]
        receives = [self._comm.receive(p, as_bytes(tensors[p]), tag) for p in self._others]
        sends = [self._comm.send(p, as_bytes(tensor), tag) for p in self._others]
        yield Requests.of(*receives, *sends).test
        return tensors
