"""Collectives of small tensors: every rank gathers all tensors and sums them itself.

Small messages are latency-bound. One non-blocking collective of MPI replaces the steps of a
hierarchical algorithm: enter, reduce in the node, exchange between nodes, add, publish.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from mntrain.comm.buffers import BufferView, Lease, as_bytes
from mntrain.comm.collective_call import CollectiveCall, SingleChunkOperation, WorldContext
from mntrain.comm.intranode import CommContext
from mntrain.comm.pending import Operation, Steps
from mntrain.comm.staging import TensorAccess
from mntrain.comm.topology import Topology
from zero.collectives import Work
from zero.kernels import sum_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The largest total of all ranks' tensors, which is what one rank receives. Above it bandwidth
# matters more than latency.
SMALL_MESSAGE_BYTES = 64 << 10


class SmallMessages:
    """The steps of collectives on small flat tensors in host memory, as one chunk.

    Sums are made over each of `nodes` in the order of its ranks, then over nodes, and rounded
    where the hierarchical algorithm over these nodes rounds: so the bits are the same.
    """

    def __init__(self, world: WorldContext, context: CommContext, nodes: Topology) -> None:
        self._world, self._context, self._nodes = world, context, nodes.nodes

    def operation(self, call: CollectiveCall, access: TensorAccess) -> Operation[Work]:
        """Plan one collective on this rank. Local."""
        steps = {"broadcast": self._broadcast, "all_gather": self._all_gather}
        return SingleChunkOperation(self._world, call, access, steps.get(call.verb, self._sum))

    def _sum(self, call: CollectiveCall, tensor: Tensor, tag: int) -> Steps[None]:
        """All-reduce; also reduce-scatter, in which every rank ends with all shards."""
        nodes, add, wire = self._nodes, self._context.add, call.wire
        with self._context.buffers.lease() as lease:
            rows = yield from self._gather(lease, tensor)
            if sum_dtype(tensor.dtype) == tensor.dtype and wire in (None, tensor.dtype):
                arrays = rows.arrays
                with np.errstate(over="ignore", invalid="ignore"):  # as torch does
                    for node in nodes:
                        if len(node) > 1:
                            _add([arrays[rank] for rank in node], arrays[node[0]])
                    _add([arrays[node[0]] for node in nodes], tensor.numpy())
                return
            for node in nodes:
                if len(node) > 1:
                    add([rows.tensors[rank] for rank in node], rows.tensors[node[0]])
            sums = [rows.tensors[node[0]] for node in nodes]
            if len(sums) == 1:
                tensor.copy_(sums[0])
                return
            add([node_sum.to(wire or tensor.dtype) for node_sum in sums], tensor)
            if wire is not None:
                tensor.copy_(tensor.to(wire))

    def _all_gather(self, call: CollectiveCall, tensor: Tensor, tag: int) -> Steps[None]:
        with self._context.buffers.lease() as lease:
            rows = yield from self._gather(lease, tensor)
            for (low, high), owner in zip(pairwise(call.bounds), self._world.owners, strict=True):
                tensor[low:high].copy_(rows.tensors[owner][low:high])

    def _broadcast(self, call: CollectiveCall, tensor: Tensor, tag: int) -> Steps[None]:
        yield self._context.comm.broadcast(as_bytes(tensor), call.root).test

    def _gather(self, lease: Lease, tensor: Tensor) -> Steps[BufferView]:
        """Return every rank's tensor, by rank, in a leased buffer."""
        comm = self._context.comm
        rows = lease.rows(comm.size, tensor.numel(), tensor.dtype)
        if rows.arrays:
            rows.arrays[comm.rank][:] = tensor.numpy()
        else:
            rows.tensors[comm.rank].copy_(tensor)
        yield comm.all_gather(rows.bytes).test
        return rows


def _add(addends: Sequence["NDArray[Any]"], total: "NDArray[Any]") -> None:
    """Leave the sum of addends, in their order, in `total`. NumPy calls cost less than torch's."""
    first, *others = addends
    if not others:
        total[:] = first
        return
    for addend in others:
        np.add(first, addend, out=total)
        first = total
