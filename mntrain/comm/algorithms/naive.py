"""The oracle: everyone sends everything to everyone, and adds in the order of ranks."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mntrain.comm.intranode import Steps
from mntrain.comm.mpi import Communicator, Requests
from mntrain.comm.reduction import as_bytes
from zero.kernels import sum_dtype


class NaiveSteps:
    """The shortest correct steps of the four verbs, on a flat tensor in host memory.

    Messages a rank: N - 1, each of the whole tensor, whatever the verb (broadcast: the root's).
    """

    def __init__(self, comm: Communicator, tensor: Tensor, tag: int) -> None:
        self._comm, self._tensor, self._tag = comm, tensor, tag
        self._others = [peer for peer in range(comm.size) if peer != comm.rank]

    def sum(self, wire: torch.dtype | None) -> Steps[None]:
        """All-reduce. A reduce-scatter too: everybody keeps all shards."""
        dtype = wire or self._tensor.dtype
        first, *others = yield from self._everyone(self._tensor.to(dtype))
        total = first.to(sum_dtype(self._tensor.dtype))
        for theirs in others:  # torch's own sum has an order that depends on the place
            total += theirs
        self._tensor.copy_(total.to(dtype))

    def gather(self, bounds: Sequence[int], owners: Sequence[int]) -> Steps[None]:
        """All-gather. `owners`: the rank that owns each slot."""
        everyone = yield from self._everyone(self._tensor)
        for (low, high), owner in zip(pairwise(bounds), owners, strict=True):
            self._tensor[low:high].copy_(everyone[owner][low:high])

    def copy(self, root: int) -> Steps[None]:
        """Broadcast."""
        data = as_bytes(self._tensor)
        if self._comm.rank == root:
            yield Requests.of(
                *(self._comm.send(peer, data, self._tag) for peer in self._others)
            ).over
        else:
            yield self._comm.receive(root, data, self._tag).over

    def _everyone(self, mine: Tensor) -> Steps[list[Tensor]]:
        """Everyone's tensor, by rank, in memory of their own."""
        everyone = [mine.clone() for _ in range(self._comm.size)]
        receives = [self._comm.receive(p, as_bytes(everyone[p]), self._tag) for p in self._others]
        sends = [self._comm.send(p, as_bytes(mine), self._tag) for p in self._others]
        yield Requests.of(*receives, *sends).over
        return everyone
