"""The steps of one chunk through the hierarchical algorithms: within the node, between nodes.

    all-reduce       reduce over the node  | sum over nodes              | publish to the node
    reduce-scatter   reduce over the node  | sum at the shard's node     | publish to its rank
    all-gather       fetch the shard       | send to the other nodes     | publish to the node
    broadcast        fetch from the root   | pass on from node to node   | publish to the node

Between two nodes, and for small tensors, every node sends its whole sum to the others, and all
nodes add all sums. Otherwise every node sums one part of the chunk, which the others send to it,
and sends them the result: the least possible number of bytes, in both directions at once, in the
latency of two messages (over a ring of M nodes: 2 (M - 1)). An all-gather goes directly as well,
unless nodes have unequal numbers of shards (see `HierarchyPlan.gathers_on_ring`).

Each level rounds a 16-bit sum once. With a wire dtype, the sum of a node is rounded to it, and so
is the sum over nodes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mntrain.comm.buffers import BufferView, Lease, as_bytes
from mntrain.comm.chunk_plan import Chunk, HierarchyPlan, Span
from mntrain.comm.collective_call import CommContext
from mntrain.comm.intranode import MessageAccess, SharedMemoryAccess
from mntrain.comm.mpi import Requests, Tags
from mntrain.comm.pending import Steps

if TYPE_CHECKING:
    from mntrain.comm.mpi import Bytes


class LaneOwner:
    """The steps of the rank that owns a lane on its node, for the chunks of one collective.

    `wire` is the dtype between nodes.
    """

    def __init__(
        self,
        context: CommContext,
        plan: HierarchyPlan,
        node: SharedMemoryAccess | MessageAccess,
        wire: torch.dtype,
        tags: Tags,
    ) -> None:
        self._context, self._comm = context, context.comm
        self._plan, self._node, self._tags = plan, node, tags
        self._wire, self._casts = wire, wire != node.dtype
        self._own = plan.node
        self._peers = [local for local in range(len(plan.members)) if local != plan.local_rank]
        count = len(plan.nodes.nodes)
        # The next node first, so that every node receives from one other at a time.
        self._others = [(self._own + step) % count for step in range(1, count)]

    def reduce(self, chunk: Chunk) -> Steps[None]:
        """All-reduce a chunk, or reduce-scatter it if it has shard owners."""
        if not self._others:
            (span,) = chunk.parts
            yield from self._node.reduce(span, self._receivers(chunk))
        elif len(chunk.parts) == 1:
            yield from self._reduce_whole(chunk)
        else:
            yield from self._reduce_parts(chunk)

    def all_gather(self, chunk: Chunk) -> Steps[None]:
        """Send this node's part to the others, directly or along a ring, and receive theirs."""
        ring = self._plan.gathers_on_ring
        receivers = self._others[:1] if ring else self._others
        arriving = {
            node: self._receive(chunk, self._others[-1] if ring else node, self._node.buffer(part))
            for node in reversed(self._others)
            if _length(part := chunk.parts[node])
        }
        own, owner = chunk.parts[self._own], chunk.shard_owners[self._own]
        sends = []
        if _length(own):
            source = self._plan.nodes.local_rank(owner)
            if source != self._plan.local_rank:
                yield from self._node.fetch(own, source)
            buffer = self._node.buffer(own)
            sends = [self._send(chunk, node, buffer) for node in receivers]
            yield from self._node.publish(own, [p for p in self._peers if p != source])
        for node, requests in arriving.items():
            yield requests.test
            if ring and node != self._others[0]:
                sends.append(
                    self._send(chunk, self._others[0], self._node.buffer(chunk.parts[node]))
                )
            yield from self._node.publish(chunk.parts[node], self._peers)
        yield Requests.of(*sends).test

    def broadcast(self, chunk: Chunk, root: int, chunks: int) -> Steps[None]:
        """Pass on one of `chunks` chunks from the node before to the nodes after."""
        (span,) = chunk.parts
        before, after = self._plan.route(root, chunks)
        peers = self._peers
        if before is not None:
            yield self._receive(chunk, before, self._node.buffer(span)).test
        elif root != self._comm.rank:
            source = self._plan.nodes.local_rank(root)
            yield from self._node.fetch(span, source)
            peers = [peer for peer in peers if peer != source]
        buffer = self._node.buffer(span)
        sends = Requests.of(*(self._send(chunk, node, buffer) for node in after))
        yield from self._node.publish(span, peers)
        yield sends.test

    def _reduce_whole(self, chunk: Chunk) -> Steps[None]:
        """Send this node's sum to every other node, and add all."""
        (span,) = chunk.parts
        with self._context.buffers.lease() as lease:
            length, others = _length(span), reversed(self._others)
            sums = {node: lease.buffer(length, self._wire) for node in others}
            cast = self._cast_buffer(lease, span)
            receives = [self._receive(chunk, node, buffer) for node, buffer in sums.items()]
            yield from self._node.reduce(span, ())
            own = yield from self._for_wire(span, cast)
            sends = self._send_to_others(chunk, own)
            yield Requests.of(*receives, sends).test
            yield from self._add_nodes(span, own, sums)
            yield from self._node.publish(span, self._peers)

    def _reduce_parts(self, chunk: Chunk) -> Steps[None]:
        """Send every node its part of this node's sum, sum this node's part, and send it to all."""
        own_part = chunk.parts[self._own]
        with self._context.buffers.lease() as lease:
            length, others = _length(own_part), reversed(self._others)
            sums = {node: lease.buffer(length, self._wire) for node in others}
            casts = [self._cast_buffer(lease, part) for part in chunk.parts]
            expected = sums.items() if length else ()
            receives = [self._receive(chunk, node, buffer) for node, buffer in expected]
            sends = {}
            for node in self._others:
                if _length(chunk.parts[node]):
                    yield from self._node.reduce(chunk.parts[node], ())
                    buffer = yield from self._for_wire(chunk.parts[node], casts[node])
                    sends[node] = self._send(chunk, node, buffer)
            if length:
                yield Requests.of(*receives).test
                yield from self._node.reduce(own_part, ())  # after the sends have started
                own = yield from self._for_wire(own_part, casts[self._own])
                yield from self._add_nodes(own_part, own, sums)
            if chunk.shard_owners:
                if length:
                    yield from self._node.publish(own_part, self._receivers(chunk))
                yield Requests.of(*sends.values()).test
            else:
                yield from self._exchange_results(chunk, casts, sends)

    def _exchange_results(
        self, chunk: Chunk, casts: Sequence[BufferView | None], sends: dict[int, Requests]
    ) -> Steps[None]:
        """Send the sum of this node's part to the other nodes, and receive those of theirs."""
        own_part = chunk.parts[self._own]
        result = yield from self._for_wire(own_part, casts[self._own])
        result_sends = self._send_to_others(chunk, result)
        receives = {}
        for node, requests in sends.items():
            yield requests.test  # the result will arrive in the buffer that was sent
            buffer = casts[node] or self._node.buffer(chunk.parts[node])
            receives[node] = self._receive(chunk, node, buffer)
        yield from self._node.publish(own_part, self._peers)
        for node, requests in receives.items():
            yield requests.test
            part, cast = chunk.parts[node], casts[node]
            if cast is not None:
                self._node.buffer(part).tensor.copy_(cast.tensor)
                yield from self._context.fence()
            yield from self._node.publish(part, self._peers)
        yield result_sends.test

    def _add_nodes(self, span: Span, own: BufferView, others: dict[int, BufferView]) -> Steps[None]:
        """Leave the sum over nodes in this rank's span, rounded to the wire dtype."""
        by_node = {self._own: own, **others}
        total = self._node.buffer(span).tensor
        self._context.add([by_node[node].tensor for node in range(len(by_node))], total)
        if self._casts:
            total.copy_(total.to(self._wire))
        yield from self._context.fence()

    def _receivers(self, chunk: Chunk) -> list[int]:
        """Return the local ranks that need the sum, other than this one."""
        if not chunk.shard_owners:
            return self._peers
        to = self._plan.nodes.local_rank(chunk.shard_owners[self._own])
        return [to] if to != self._plan.local_rank else []

    def _for_wire(self, span: Span, cast: BufferView | None) -> Steps[BufferView]:
        """Return a span in the wire dtype: in its own memory, or copied to the cast buffer."""
        if cast is None:
            return self._node.buffer(span)
        cast.tensor.copy_(self._node.buffer(span).tensor)
        yield from self._context.fence()
        return cast

    def _cast_buffer(self, lease: Lease, span: Span) -> BufferView | None:
        """Return a buffer for this node's data of a span, if the wire dtype differs."""
        return lease.buffer(_length(span), self._wire) if self._casts else None

    def _send_to_others(self, chunk: Chunk, buffer: BufferView) -> Requests:
        nodes = self._others if buffer.bytes.nbytes else []
        return Requests.of(*(self._send(chunk, node, buffer) for node in nodes))

    def _send(self, chunk: Chunk, node: int, buffer: BufferView) -> Requests:
        owner = self._plan.lane_owners[chunk.lane][node]
        return self._comm.send(owner, buffer.bytes, self._tags.of(chunk.index))

    def _receive(self, chunk: Chunk, node: int, buffer: BufferView) -> Requests:
        owner = self._plan.lane_owners[chunk.lane][node]
        return self._comm.receive(owner, buffer.bytes, self._tags.of(chunk.index))


class NodeMember:
    """The steps of a node's other ranks where everything within the node travels as messages.

    They send and receive the spans of `intranode.MessageAccess`, in the lane owner's order.
    """

    def __init__(
        self, context: CommContext, plan: HierarchyPlan, tensor: Tensor, tags: Tags
    ) -> None:
        self._comm, self._plan, self._tensor = context.comm, plan, tensor
        self._tags, self._own = tags, plan.node

    def reduce(self, chunk: Chunk) -> Steps[None]:
        """Send this rank's addends; receive the sums that it needs."""
        parts = chunk.parts
        others = [(self._own + step) % len(parts) for step in range(1, len(parts))]
        own = self._own if len(parts) > 1 else 0
        others_parts = [parts[node] for node in others]
        yield from self._send(chunk, [*others_parts, parts[own]])
        if not chunk.shard_owners:
            yield from self._receive(chunk, [parts[own], *others_parts])
        elif chunk.shard_owners[own] == self._comm.rank:
            yield from self._receive(chunk, [parts[own]])

    def all_gather(self, chunk: Chunk) -> Steps[None]:
        """Send this rank's shard; receive those of the other ranks."""
        parts, own = chunk.parts, self._own
        before = [(own - step) % len(parts) for step in range(1, len(parts))]
        wanted = [parts[node] for node in before]
        if chunk.shard_owners[own] == self._comm.rank:
            yield from self._send(chunk, [parts[own]])
        else:
            wanted.insert(0, parts[own])
        yield from self._receive(chunk, wanted)

    def broadcast(self, chunk: Chunk, root: int, chunks: int) -> Steps[None]:
        """Send the chunk if this rank is the root; otherwise receive it."""
        if root == self._comm.rank:
            yield from self._send(chunk, chunk.parts)
        else:
            yield from self._receive(chunk, chunk.parts)

    def _send(self, chunk: Chunk, spans: Sequence[Span]) -> Steps[None]:
        owner, tag = self._plan.members[chunk.lane], self._tags.of(chunk.index)
        yield Requests.of(*(self._comm.send(owner, self._bytes(s), tag) for s in spans)).test

    def _receive(self, chunk: Chunk, spans: Sequence[Span]) -> Steps[None]:
        owner, tag = self._plan.members[chunk.lane], self._tags.of(chunk.index)
        yield Requests.of(*(self._comm.receive(owner, self._bytes(s), tag) for s in spans)).test

    def _bytes(self, span: Span) -> "Bytes":
        return as_bytes(self._tensor[slice(*span)])


def _length(span: Span) -> int:
    return span[1] - span[0]
