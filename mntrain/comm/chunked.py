"""The hierarchical algorithms: a call in chunks, or in one exchange of messages if it is small."""

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from mntrain.comm import small_messages
from mntrain.comm.buffers import BufferView, as_bytes
from mntrain.comm.chunk_plan import Chunk, HierarchyPlan
from mntrain.comm.collective_call import CollectiveCall, CommContext
from mntrain.comm.hierarchical import LaneOwner, NodeMember
from mntrain.comm.intranode import MessageAccess, SharedMemoryAccess
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


def run_hierarchical(
    plan: HierarchyPlan, call: CollectiveCall, access: TensorAccess, context: CommContext
) -> Operation[Work] | Steps[Work]:
    """Return the steps of one call on this rank, which the engine runs. Local."""
    if call.small:
        return small_collective(plan, call, access, context)
    return ChunkedCollective(plan, call, access, context)


class ChunkedCollective:
    """An `Operation` on a flat tensor, cut into the chunks of a plan.

    Chunks go through shared memory or messages within nodes, and through messages between nodes.
    """

    def __init__(
        self, plan: HierarchyPlan, call: CollectiveCall, access: TensorAccess, context: CommContext
    ) -> None:
        self._plan, self._call, self._access, self._context = plan, call, access, context
        self.max_in_flight = max(
            2, min(CHUNKS_IN_FLIGHT, BYTES_IN_FLIGHT // call.choice.chunk_bytes)
        )
        self.latency_bound = not call.choice.concurrent
        self._flags = context.flags if len(plan.members) > 1 else None
        self._number = 0  # of this collective among those of the flags
        self._inline: Tensor | None = None  # the flags' slot with the result, if it is there

    def begin(self) -> None:
        """Start to bring the tensor into place."""
        self._access.begin()

    def enter(self) -> bool:
        """Enter the node's flags once the tensor is in place."""
        if not self._access.here():
            return False
        if self._flags is not None:
            self._number = self._flags.enter(
                self._access.host, self._call.ticket.digest, reachable=self._access.reachable
            )
        return True

    def all_entered(self) -> bool:
        """Return whether all ranks of the node have entered, with the same call."""
        return self._flags is None or self._flags.all_entered(self._number)

    def chunks(self) -> Iterator[NumberedChunk]:
        """Yield the chunks in which this rank takes part."""
        plan, context, tensor = self._plan, self._context, self._access.host
        wire = self._call.wire or tensor.dtype
        chunks = self._planned(tensor)
        tags = context.comm.tags(self._call.ticket.digest, len(chunks))
        tensors: list[Tensor] | None = [tensor]
        if self._flags is not None:
            tensors = self._flags.tensors(self._number, tensor)
        member = owner = None
        if tensors is None:
            member = NodeMember(context, plan, tensor, tags)
        else:
            own = tensors[plan.local_rank]
            self._inline = None if own is tensor else own
            shared = SharedMemoryAccess(context, plan, tensors)
            owner = LaneOwner(context, plan, shared, wire, tags)
        for chunk in chunks:
            role: LaneOwner | NodeMember | None = member
            if chunk.lane == plan.local_rank:
                by_messages = MessageAccess(context, plan, tensor, tags.of(chunk.index))
                role = owner or LaneOwner(context, plan, by_messages, wire, tags)
            if role is not None:
                yield tags.first + chunk.index, context.run(self._steps(role, chunk, len(chunks)))

    def leave(self) -> None:
        """Leave the node's flags."""
        if self._flags is not None:
            self._flags.leave()

    def all_left(self) -> bool:
        """Return whether all ranks of the node have left."""
        return self._flags is None or self._flags.all_left(self._number)

    def finish(self) -> Work:
        """Return the work that brings the result back to the caller's tensor."""
        if self._inline is not None:
            self._access.host.copy_(self._inline)
        return self._access.give_back()

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


def small_collective(
    plan: HierarchyPlan, call: CollectiveCall, access: TensorAccess, context: CommContext
) -> Steps[Work]:
    """Run a call on a small host tensor: every rank gathers all tensors and sums them itself.

    Small messages are latency-bound. One non-blocking collective of MPI replaces the steps of a
    chunk: enter, reduce in the node, exchange between nodes, add, publish. Sums are made over each
    node of the plan in the order of its ranks, then over nodes, and rounded where the chunks' steps
    round, so the result has the same bits.
    """
    access.begin()
    if not access.here():
        yield access.here
    tensor, comm = access.host, context.comm
    tag = comm.tags(call.ticket.digest, 1).of(0)
    if call.verb == "broadcast":
        yield from small_messages.broadcast(comm, as_bytes(tensor), call.root, tag)
        return access.give_back()
    with context.buffers.lease() as lease:
        rows = lease.rows(comm.size, tensor.numel(), tensor.dtype)
        if rows.arrays:
            rows.arrays[comm.rank][:] = tensor.numpy()
        else:
            rows.tensors[comm.rank].copy_(tensor)
        yield from small_messages.all_gather(comm, rows.bytes, tag)
        if call.verb == "all_gather":
            for (low, high), owner in zip(
                pairwise(call.bounds), context.topology.owners, strict=True
            ):
                tensor[low:high].copy_(rows.tensors[owner][low:high])
        else:  # a reduce-scatter leaves the sums of all shards on every rank
            _add_rows(rows, plan.nodes.nodes, tensor, call, context)
    return access.give_back()


def _add_rows(
    rows: BufferView,
    nodes: Sequence[Sequence[int]],
    total: Tensor,
    call: CollectiveCall,
    context: CommContext,
) -> None:
    """Leave the sum over nodes of the sums over their ranks in `total`. Overwrites the rows."""
    wire = call.wire or total.dtype
    if sum_dtype(total.dtype) == total.dtype == wire:
        arrays = rows.arrays
        with np.errstate(over="ignore", invalid="ignore"):  # as torch does
            for node in nodes:
                _add_arrays([arrays[rank] for rank in node], arrays[node[0]])
            _add_arrays([arrays[node[0]] for node in nodes], total.numpy())
        return
    for node in nodes:
        if len(node) > 1:
            context.add([rows.tensors[rank] for rank in node], rows.tensors[node[0]])
    sums = [rows.tensors[node[0]] for node in nodes]
    if len(sums) == 1:
        total.copy_(sums[0])
        return
    context.add([node_sum.to(wire) for node_sum in sums], total)
    total.copy_(total.to(wire))


def _add_arrays(addends: Sequence["NDArray[Any]"], total: "NDArray[Any]") -> None:
    """Leave the sum of addends, in their order, in `total`. NumPy calls cost less than torch's."""
    result = reduce(partial(np.add, out=total), addends)
    if result is not total:
        total[:] = result
