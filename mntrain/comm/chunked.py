"""The operations of the hierarchical algorithms: in chunks, or in one message if small."""

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from mntrain.comm.buffers import BufferRows, Lease, as_bytes
from mntrain.comm.chunk_plan import Chunk, HierarchyPlan
from mntrain.comm.hierarchical import LaneOwner, NodeMember, tag_of
from mntrain.comm.intranode import MessageAccess, SharedMemoryAccess
from mntrain.comm.operation import CollectiveCall, CollectiveOperation, CommContext
from mntrain.comm.pending import NumberedChunk, Operation, Steps
from mntrain.comm.staging import TensorAccess
from zero.collectives import Work
from zero.kernels import sum_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Chunks in flight: enough to fill a link while other ranks compute on the core. More bytes than
# switches can buffer would be dropped on the way to a node to which all others send.
CHUNKS_IN_FLIGHT = 8
BYTES_IN_FLIGHT = 4 << 20


def hierarchical_operation(
    plan: HierarchyPlan, call: CollectiveCall, access: TensorAccess, context: CommContext
) -> Operation[Work]:
    """Return the operation of one call by the algorithm of a plan. Local."""
    kind = SmallCollective if call.small else ChunkedCollective
    return kind(plan, call, access, context)


class ChunkedCollective(CollectiveOperation):
    """An operation on a tensor that is cut into the chunks of a plan.

    Within nodes, it goes through shared memory or messages; between nodes, through messages.
    """

    def __init__(
        self, plan: HierarchyPlan, call: CollectiveCall, access: TensorAccess, context: CommContext
    ) -> None:
        super().__init__(call, access, context, context.flags if len(plan.members) > 1 else None)
        self._plan = plan
        self.max_in_flight = max(
            2, min(CHUNKS_IN_FLIGHT, BYTES_IN_FLIGHT // call.choice.chunk_bytes)
        )
        self._inline: Tensor | None = None  # the flags' slot with the result, if it is there

    def chunks(self) -> Iterator[NumberedChunk]:
        """Yield the chunks in which this rank takes part."""
        plan, context, tensor = self._plan, self._context, self._access.host
        wire = self._call.wire or tensor.dtype
        chunks = self._planned(tensor)
        first = context.comm.number_chunks(len(chunks))
        tensors: list[Tensor] | None = [tensor]
        if self._flags is not None:
            tensors = self._flags.tensors(self._number, tensor)
        member = owner = None
        if tensors is None:
            member = NodeMember(context, plan, tensor, first)
        else:
            own = tensors[plan.local_rank]
            self._inline = None if own is tensor else own
            shared = SharedMemoryAccess(context, plan, tensors)
            owner = LaneOwner(context, plan, shared, wire, first)
        for chunk in chunks:
            role: LaneOwner | NodeMember | None = member
            if chunk.lane == plan.local_rank:
                by_messages = MessageAccess(context, plan, tensor, tag_of(first, chunk))
                role = owner or LaneOwner(context, plan, by_messages, wire, first)
            if role is not None:
                yield first + chunk.index, context.run(self._steps(role, chunk, len(chunks)))

    def finish(self) -> Work:
        """Return the work that brings the result back to the caller's tensor."""
        if self._inline is not None:
            self._access.host.copy_(self._inline)
        return super().finish()

    def _planned(self, tensor: Tensor) -> tuple[Chunk, ...]:
        call, plan = self._call, self._plan
        sizes = tensor.element_size(), call.choice.chunk_bytes, call.choice.min_chunks
        if call.verb == "all_reduce":
            return plan.all_reduce(len(tensor), *sizes)
        if call.verb == "broadcast":
            return plan.broadcast(len(tensor), *sizes)
        return plan.by_shard(call.bounds, *sizes)

    def _steps(self, role: LaneOwner | NodeMember, chunk: Chunk, chunks: int) -> Steps[None]:
        if self._call.verb == "broadcast":
            return role.broadcast(chunk, self._call.root, chunks)
        return role.all_gather(chunk) if self._call.verb == "all_gather" else role.reduce(chunk)


class SmallCollective(CollectiveOperation):
    """An operation on a small host tensor: every rank gathers all tensors and sums them itself.

    Small messages are latency-bound. One non-blocking collective of MPI replaces the steps of a
    chunk: enter, reduce in the node, exchange between nodes, add, publish. Sums are made over each
    node of the plan in the order of its ranks, then over nodes, and rounded where the chunks' steps
    round: so the bits are the same.
    """

    def __init__(
        self, plan: HierarchyPlan, call: CollectiveCall, access: TensorAccess, context: CommContext
    ) -> None:
        super().__init__(call, access, context)
        self._nodes = plan.nodes.nodes

    def chunks(self) -> Iterator[NumberedChunk]:
        """Yield the only chunk."""
        number, tensor = self._context.comm.number_chunks(1), self._access.host
        if self._call.verb == "broadcast":
            yield number, self._broadcast(tensor)
        elif self._call.verb == "all_gather":
            yield number, self._all_gather(tensor)
        else:
            yield number, self._sum(tensor)

    def _sum(self, tensor: Tensor) -> Steps[None]:
        """All-reduce; also reduce-scatter, in which every rank ends with all shards."""
        nodes, add, wire = self._nodes, self._context.add, self._call.wire
        with self._context.buffers.lease() as lease:
            rows = yield from self._gather(lease, tensor)
            if sum_dtype(tensor.dtype) == tensor.dtype and wire in (None, tensor.dtype):
                arrays = rows.arrays
                with np.errstate(over="ignore", invalid="ignore"):  # as torch does
                    for node in nodes:
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

    def _all_gather(self, tensor: Tensor) -> Steps[None]:
        owners = self._context.topology.owners
        with self._context.buffers.lease() as lease:
            rows = yield from self._gather(lease, tensor)
            for (low, high), owner in zip(pairwise(self._call.bounds), owners, strict=True):
                tensor[low:high].copy_(rows.tensors[owner][low:high])

    def _broadcast(self, tensor: Tensor) -> Steps[None]:
        yield self._context.comm.broadcast(as_bytes(tensor), self._call.root).test

    def _gather(self, lease: Lease, tensor: Tensor) -> Steps[BufferRows]:
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
    result = reduce(partial(np.add, out=total), addends)
    if result is not total:
        total[:] = result
