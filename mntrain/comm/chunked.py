"""The hierarchical algorithms' operations: from a call to the chunks that the engine drives."""

from collections.abc import Iterator

from torch import Tensor

from mntrain.comm.chunk_plan import Chunk, HierarchyPlan
from mntrain.comm.collective_call import CollectiveCall, WorldContext
from mntrain.comm.hierarchical import LaneOwner, NodeMember, tag_of
from mntrain.comm.intranode import CommContext, MessageAccess, SharedMemoryAccess
from mntrain.comm.pending import NumberedChunk, Operation, Steps
from mntrain.comm.small_messages import SmallCollective
from mntrain.comm.staging import TensorAccess
from zero.collectives import Work

# Chunks in flight: enough to fill a link while other ranks compute on the core. More bytes than
# switches can buffer would be dropped on the way to a node to which all others send.
CHUNKS_IN_FLIGHT = 8
BYTES_IN_FLIGHT = 4 << 20


class HierarchicalAlgorithm:
    """The algorithm of a plan: shared memory or messages within nodes, messages between them."""

    host_only = False

    def __init__(self, world: WorldContext, plan: HierarchyPlan) -> None:
        self._world, self._plan = world, plan

    def operation(
        self, call: CollectiveCall, access: TensorAccess, context: CommContext
    ) -> Operation[Work]:
        """Implement `Algorithm.operation`: in chunks, or in one message if the call is small."""
        if call.small:
            return SmallCollective(self._world, call, access, context, self._plan.nodes)
        return ChunkedCollective(self._world, self._plan, call, access, context)


class ChunkedCollective:
    """An `Operation` on a flat tensor, cut into the chunks of a plan."""

    def __init__(
        self,
        world: WorldContext,
        plan: HierarchyPlan,
        call: CollectiveCall,
        access: TensorAccess,
        context: CommContext,
    ) -> None:
        self._world, self._plan, self._call = world, plan, call
        self._access, self._context = access, context
        self.max_in_flight = max(
            2, min(CHUNKS_IN_FLIGHT, BYTES_IN_FLIGHT // call.choice.chunk_bytes)
        )
        self.wakes_thread = call.wakes_thread
        self.latency_bound = not call.choice.concurrent
        self._flags = world.flags if len(plan.members) > 1 else None
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
            self._number = self._flags.entered
            self._flags.enter(self._access.host, reachable=self._access.reachable)
        return True

    def all_entered(self) -> bool:
        """Return whether all ranks of the node have entered."""
        return self._flags is None or self._flags.all_entered(self._number)

    def chunks(self) -> Iterator[NumberedChunk]:
        """Yield the chunks in which this rank takes part."""
        for number, steps in self._chunks():
            yield number, self._context.run(steps)

    def _chunks(self) -> Iterator[NumberedChunk]:
        plan, context, tensor = self._plan, self._context, self._access.host
        wire = self._call.wire or tensor.dtype
        chunks = self._planned()
        first = self._world.number_chunks(len(chunks))
        tensors: list[Tensor] | None = [tensor]
        if self._flags is not None:
            tensors = self._flags.tensors(self._number, tensor)
        if tensors is not None:
            own = tensors[plan.local_rank]
            self._inline = None if own is tensor else own
            shared = SharedMemoryAccess(context, plan, tensors)
            owner = LaneOwner(context, plan, shared, wire, first)
            for chunk in chunks:
                if chunk.lane == plan.local_rank:
                    yield first + chunk.index, self._steps(owner, chunk, len(chunks))
            return
        for chunk in chunks:
            role: LaneOwner | NodeMember = NodeMember(context, plan, tensor, first)
            if chunk.lane == plan.local_rank:
                by_messages = MessageAccess(context, plan, tensor, tag_of(first, chunk))
                role = LaneOwner(context, plan, by_messages, wire, first)
            yield first + chunk.index, self._steps(role, chunk, len(chunks))

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

    def _planned(self) -> tuple[Chunk, ...]:
        call, tensor, plan = self._call, self._access.host, self._plan
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
