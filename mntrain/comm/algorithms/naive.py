"""Naive: every rank sends its whole tensor to every other and sums in rank order. The test oracle.

Each rank sends N - 1 messages of the whole tensor, whatever the verb (broadcast: only the root).
"""

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor

from mntrain.comm.buffers import as_bytes
from mntrain.comm.mpi import TAGS, Requests
from mntrain.comm.operation import Algorithm, CollectiveOperation
from mntrain.comm.pending import NumberedChunk, Steps
from mntrain.comm.topology import Topology
from zero.kernels import sum_dtype

AUTO, HOST_ONLY = False, True


def make(topology: Topology, rank: int) -> Algorithm:
    """Return the algorithm for a rank."""
    return NaiveCollective


class NaiveCollective(CollectiveOperation):
    """The shortest correct implementation of the four verbs, on host memory."""

    def chunks(self) -> Iterator[NumberedChunk]:
        """Yield the only chunk."""
        number = self._context.comm.number_chunks(1)
        verbs = {"broadcast": self._broadcast, "all_gather": self._all_gather}
        steps = verbs.get(self._call.verb, self._sum)
        yield number, steps(self._access.host, number % TAGS)

    def _sum(self, tensor: Tensor, tag: int) -> Steps[None]:
        """All-reduce; also reduce-scatter, in which every rank ends with all shards."""
        dtype = self._call.wire or tensor.dtype
        first, *others = yield from self._gather(tensor.to(dtype), tag)
        total = first.to(sum_dtype(tensor.dtype))
        for addend in others:  # torch.sum adds in another order
            total += addend
        tensor.copy_(total.to(dtype))

    def _all_gather(self, tensor: Tensor, tag: int) -> Steps[None]:
        tensors = yield from self._gather(tensor, tag)
        owners = self._context.topology.owners
        for (low, high), owner in zip(pairwise(self._call.bounds), owners, strict=True):
            tensor[low:high].copy_(tensors[owner][low:high])

    def _broadcast(self, tensor: Tensor, tag: int) -> Steps[None]:
        comm, data = self._context.comm, as_bytes(tensor)
        if comm.rank == self._call.root:
            others = [peer for peer in range(comm.size) if peer != comm.rank]
            yield Requests.of(*(comm.send(peer, data, tag) for peer in others)).test
        else:
            yield comm.receive(self._call.root, data, tag).test

    def _gather(self, tensor: Tensor, tag: int) -> Steps[list[Tensor]]:
        """Return copies of every rank's tensor, by rank."""
        comm = self._context.comm
        tensors = [tensor.clone() for _ in range(comm.size)]
        others = [peer for peer in range(comm.size) if peer != comm.rank]
        receives = [comm.receive(peer, as_bytes(tensors[peer]), tag) for peer in others]
        sends = [comm.send(peer, as_bytes(tensor), tag) for peer in others]
        yield Requests.of(*receives, *sends).test
        return tensors
