"""The hierarchical algorithms: a call in chunks; a small one is left to `small_messages`.

The steps of one chunk, by the rank that owns its lane on a node:

    all-reduce       reduce over the node  | sum over nodes              | publish to the node
    reduce-scatter   reduce over the node  | sum at the shard's node     | publish to its rank
    all-gather       fetch the shard       | send to the other nodes     | publish to the node
    broadcast        fetch from the root   | pass on from node to node   | publish to the node

In shared memory the owner reads and writes the tensors of the node's ranks, and they have nothing
to do. Tensors elsewhere travel within the node as messages, too.

Between two nodes, both send their whole sum, and add. Otherwise every node sums one part of the
chunk, which the others send to it, and sends them the result: the least possible number of bytes,
in both directions at once. Up to four nodes do so directly, in the latency of two messages (over a
ring of M nodes: 2 (M - 1)), and more nodes hop by hop, in groups (`HierarchyPlan.widths`). An
all-gather goes the second half of this way, or around a ring if nodes have unequal numbers of
shards (`HierarchyPlan.gathers_on_ring`).

Sums are made here, in the order of a node's ranks or of a hop's nodes, and in fp32 or wider: MPI
has no dependable sum of bf16 and fp16. Whichever rank owns an element, its sum has the same order,
so all verbs and cuts give the same bits. The node and each hop round a 16-bit sum once. With a wire
dtype, the sum of a node is rounded to it, and so is the sum of each hop.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 2005: recursive halving and doubling, here by any factors.
"""

from collections.abc import Collection, Generator, Iterator, Sequence

import torch
from torch import Tensor

from mntrain.comm.chunk_plan import Chunk, HierarchyPlan, Span, chunks_of
from mntrain.comm.engine import NumberedChunk, Pipelined, Steps, Test
from mntrain.comm.mpi import Requests
from mntrain.comm.peer_memory import PeerTensor
from mntrain.comm.resources import (
    BufferView,
    CommContext,
    Take,
    TensorAccess,
    as_bytes,
)
from mntrain.comm.small_messages import small_collective
from mntrain.comm.ticket import Ticket

BLOCK_BYTES = 256 << 10  # what is summed and published while it is in the cache


def run_hierarchical(
    plan: HierarchyPlan, ticket: Ticket, access: TensorAccess, context: CommContext
) -> Pipelined | Steps[torch.cuda.Event | None]:
    """Return the steps of one call on this rank, which the engine runs. Local."""
    call = ticket.signature
    assert call.choice is not None
    if call.small:
        return small_collective(plan, ticket, access, context)
    chunks, most = chunks_of(plan, call._replace(label="", parts=1), access.bounds)
    steps = ChunkedCall(plan, ticket, access, context, chunks).steps()
    return Pipelined(steps, most, latency_bound=not call.choice.concurrent)


class ChunkedCall:
    """One call on a flat tensor, on this rank, which owns a lane of it on its node, or none.

    Where the tensors of the node's ranks are out of reach, the others run `_member` for a chunk.
    """

    def __init__(
        self,
        plan: HierarchyPlan,
        ticket: Ticket,
        access: TensorAccess,
        context: CommContext,
        chunks: Sequence[Chunk],
    ) -> None:
        self._plan, self._ticket, self._access = plan, ticket, access
        self._context, self._comm, self._chunks = context, context.comm, chunks
        self._peers = [local for local in range(len(plan.members)) if local != plan.local_rank]
        count = len(plan.nodes.nodes)
        # The next node first, so that every node receives from one other at a time.
        self._others = [(plan.node + step) % count for step in range(1, count)]

    def steps(self) -> Generator[Test | Iterator[NumberedChunk], None, torch.cuda.Event | None]:
        """Run the call, as `engine.Pipelined`."""
        access, ticket = self._access, self._ticket
        flags = self._context.flags if self._peers else None
        access.begin()
        yield access.here
        self._tensor = tensor = access.host
        number = flags.enter(tensor, ticket.digest, reachable=access.reachable) if flags else 0
        yield lambda: flags is None or flags.all_entered(number)
        tensors = flags.tensors(number, tensor) if flags else [tensor]
        self._shared = tensors is not None
        self._tensors = [tensor] if tensors is None else tensors
        self._bytes = as_bytes(tensor)
        self._wire = ticket.signature.wire or tensor.dtype
        self._casts = self._wire != tensor.dtype
        self._ratio = ticket.ratio * tensor.element_size() / self._wire.itemsize
        yield self._own_chunks()
        if flags:
            flags.leave()
        yield lambda: flags is None or flags.all_left(number)
        return access.give_back()

    def _own_chunks(self) -> Iterator[NumberedChunk]:
        """Yield the chunks in which this rank takes part."""
        call, count = self._ticket.signature, len(self._chunks)
        first, self._tags = self._comm.tags(self._ticket.digest, count)
        for chunk in self._chunks:
            if chunk.lane == self._plan.local_rank:
                if call.verb == "broadcast":
                    steps = self.broadcast(chunk, call.root, count)
                elif call.verb == "all_gather":
                    steps = self.all_gather(chunk)
                else:
                    steps = self.reduce(chunk)
            elif not self._shared:
                steps = self._member(chunk)
            else:
                continue
            yield first + chunk.index, self._context.run(steps)

    def reduce(self, chunk: Chunk) -> Steps[None]:
        """All-reduce a chunk, or reduce-scatter it if it has shard owners."""
        if not self._others:
            (span,) = chunk.parts
            yield from self._sum_node(chunk, span, self._receivers(chunk))
        elif len(chunk.parts) == 1:
            yield from self._reduce_whole(chunk)
        else:
            yield from self._reduce_parts(chunk)

    def all_gather(self, chunk: Chunk) -> Steps[None]:
        """Send this node's part to the others, hop by hop or along a ring, and get theirs."""
        own, source = chunk.parts[self._plan.node], self._plan.local_rank
        if _length(own):
            source = self._plan.members.index(chunk.shard_owners[self._plan.node])
        if source != self._plan.local_rank:
            yield from self._fetch(chunk, own, source)
        lacking = [peer for peer in self._peers if peer != source]
        if self._plan.gathers_on_ring:
            yield from self._gather_on_ring(chunk, lacking)
        else:
            with self._context.buffers.lease() as take:
                yield from self._gather(chunk, take, lacking, {})

    def broadcast(self, chunk: Chunk, root: int, chunks: int) -> Steps[None]:
        """Copy one of `chunks` chunks from the root's node to the others."""
        (span,), plan, peers = chunk.parts, self._plan, self._peers
        first = plan.nodes.node(root)
        if plan.node == first and root != self._comm.rank:
            source = plan.nodes.local_rank(root)
            yield from self._fetch(chunk, span, source)
            peers = [peer for peer in peers if peer != source]
        before, after = plan.route(root, chunks)
        buffer = self._buffer(span)
        if before is not None:
            yield self._receive(chunk, before, buffer).test
        sends = Requests.of(*(self._send(chunk, node, buffer) for node in after))
        yield from self._publish(chunk, span, peers)
        yield sends.test

    def _reduce_whole(self, chunk: Chunk) -> Steps[None]:
        """Send this node's sum to every other node, and add all."""
        (span,) = chunk.parts
        with self._context.buffers.lease() as take:
            sums = {node: take(_length(span), self._wire) for node in reversed(self._others)}
            receives = [self._receive(chunk, node, buffer) for node, buffer in sums.items()]
            yield from self._sum_node(chunk, span, ())
            own = yield from self._packed(take, chunk.parts)
            sends = [self._send(chunk, node, own) for node in self._others]
            yield Requests.of(*receives, *sends).test
            yield from self._add_nodes(chunk.parts, own, sums)
            yield from self._publish(chunk, span, self._peers)

    def _reduce_parts(self, chunk: Chunk) -> Steps[None]:
        """Sum what this node is to hold after each hop, and send partners what they are to."""
        plan, sent = self._plan, dict[int, tuple[BufferView, Requests]]()
        with self._context.buffers.lease() as take:
            for hop in range(len(plan.widths) - 1):
                own = plan.held(chunk, plan.node, hop + 1)
                length, partners = sum(map(_length, own)), plan.partners(hop)
                sums = {node: take(length, self._wire) for node in reversed(partners) if own}
                receives = [self._receive(chunk, node, buffer) for node, buffer in sums.items()]
                for node in partners:
                    if theirs := plan.held(chunk, node, hop + 1):
                        yield from self._sum_spans(chunk, theirs, hop)
                        buffer = yield from self._packed(take, theirs)
                        sent[node] = buffer, self._send(chunk, node, buffer)
                yield Requests.of(*receives).test
                yield from self._sum_spans(chunk, own, hop)  # after the sends have started
                packed = yield from self._packed(take, own)
                yield from self._add_nodes(own, packed, sums)
            if not chunk.shard_owners:
                yield from self._gather(chunk, take, self._peers, sent)
                return
            for span in own:
                yield from self._publish(chunk, span, self._receivers(chunk))
            yield Requests.of(*(requests for _, requests in sent.values())).test

    def _gather(
        self,
        chunk: Chunk,
        take: Take,
        lacking: Collection[int],
        sent: dict[int, tuple[BufferView, Requests]],
    ) -> Steps[None]:
        """Send partners what this node holds, from the last hop to the first, and get theirs.

        `lacking` are the local ranks that lack this node's own part. What was `sent` to a node
        before, as a sum, comes back in the same buffer.
        """
        plan, sends = self._plan, list[Requests]()
        hops = len(plan.widths) - 1
        new = [(span, lacking) for span in plan.held(chunk, plan.node, hops)]
        for hop in reversed(range(hops)):
            partners = plan.partners(hop)
            if own := plan.held(chunk, plan.node, hop + 1):
                packed = yield from self._packed(take, own)
                sends += [self._send(chunk, node, packed) for node in partners]
            arriving = []
            for node in reversed(partners):
                spans = plan.held(chunk, node, hop + 1)
                if node in sent:
                    buffer, requests = sent[node]
                    yield requests.test
                elif spans:
                    buffer = self._room(take, spans)
                if spans:
                    arriving.append((spans, buffer, self._receive(chunk, node, buffer)))
            for span, to in new:
                yield from self._publish(chunk, span, to)
            new = []
            for spans, buffer, requests in arriving:
                yield requests.test
                yield from self._copy(spans, buffer, back=True)
                for span in spans:
                    yield from self._publish(chunk, span, self._peers)
        yield Requests.of(*sends).test

    def _gather_on_ring(self, chunk: Chunk, lacking: Collection[int]) -> Steps[None]:
        """Send this node's part to the next node, and pass on those that come from the last one."""
        own, parts = chunk.parts[self._plan.node], chunk.parts
        following, before = self._others[0], self._others[-1]
        arriving = {
            node: self._receive(chunk, before, self._buffer(parts[node]))
            for node in reversed(self._others)
            if _length(parts[node])
        }
        sends = []
        if _length(own):
            sends = [self._send(chunk, following, self._buffer(own))]
            yield from self._publish(chunk, own, lacking)
        for node, requests in arriving.items():
            yield requests.test
            if node != following:
                sends.append(self._send(chunk, following, self._buffer(parts[node])))
            yield from self._publish(chunk, parts[node], self._peers)
        yield Requests.of(*sends).test

    def _add_nodes(
        self, spans: Sequence[Span], own: BufferView, others: dict[int, BufferView]
    ) -> Steps[None]:
        """Leave the sums over nodes in this rank's spans, rounded to the wire dtype."""
        by_node = {self._plan.node: own, **others}
        addends, start = [by_node[node].tensor for node in sorted(by_node)], 0
        for span in spans:
            total, stop = self._buffer(span).tensor, start + _length(span)
            parts = [addend[start:stop] for addend in addends] if len(spans) > 1 else addends
            self._context.add(parts, total)
            if self._casts:
                total.copy_(total.to(self._wire))
            start = stop
        yield from self._context.fence()

    def _receivers(self, chunk: Chunk) -> list[int]:
        """Return the local ranks that need the sum, other than this one."""
        if not chunk.shard_owners:
            return self._peers
        to = self._plan.members.index(chunk.shard_owners[self._plan.node])
        return [to] if to != self._plan.local_rank else []

    def _room(self, take: Take, spans: Sequence[Span]) -> BufferView:
        """Return memory for spans in the wire dtype, end to end: their own, or a buffer."""
        if len(spans) == 1 and not self._casts:
            return self._buffer(spans[0])
        return take(sum(map(_length, spans)), self._wire)

    def _packed(self, take: Take, spans: Sequence[Span]) -> Steps[BufferView]:
        """Return this rank's spans in the wire dtype, end to end: in place, or as a copy."""
        room = self._room(take, spans)
        yield from self._copy(spans, room, back=False)
        return room

    def _copy(self, spans: Sequence[Span], room: BufferView, *, back: bool) -> Steps[None]:
        """Copy this rank's spans to their `_room`, or back from it, if it is elsewhere."""
        if len(spans) == 1 and not self._casts:
            return
        start = 0
        for span in spans:
            here, there = self._buffer(span).tensor, room.tensor[start : start + _length(span)]
            target, source = (here, there) if back else (there, here)
            target.copy_(source)
            start += _length(span)
        yield from self._context.fence()

    def _send(self, chunk: Chunk, node: int, buffer: BufferView) -> Requests:
        owner = self._plan.lane_owners[chunk.lane][node]
        tag = self._tags[chunk.index]
        return self._comm.send(owner, buffer.bytes, tag, ratio=self._ratio)

    def _receive(self, chunk: Chunk, node: int, buffer: BufferView) -> Requests:
        owner = self._plan.lane_owners[chunk.lane][node]
        return self._comm.receive(owner, buffer.bytes, self._tags[chunk.index])

    def _of(self, span: Span) -> Sequence[Tensor | PeerTensor]:
        """Return a span of every tensor within reach."""
        low, high = span
        return [tensor[low:high] for tensor in self._tensors]

    def _buffer(self, span: Span) -> BufferView:
        """Return a view of a span of this rank's tensor."""
        low, high = span
        size = self._tensor.element_size()
        return BufferView(self._tensor[low:high], self._bytes[low * size : high * size])

    # Within the node. In shared memory these steps never wait: all ranks have entered.

    def _sum_node(self, chunk: Chunk, span: Span, to: Collection[int]) -> Steps[None]:
        """Leave the sum over the node in the spans of this rank and of the local ranks `to`."""
        if not self._shared:
            yield from self._sum_messages(chunk, span, to)
            return
        addends, own = self._of(span), self._buffer(span).tensor
        if len(addends) == 1:
            return
        far = [at for at, addend in enumerate(addends) if isinstance(addend, PeerTensor)]
        block = BLOCK_BYTES // own.element_size() if to or far else len(own)
        with self._context.buffers.lease() as take:
            rooms = {at: take(min(block, len(own)), own.dtype).tensor for at in far}
            cut = zip(*(addend.split(block) for addend in addends), strict=True)
            for blocks, total in zip(cut, own.split(block), strict=True):
                near = [
                    part if isinstance(part, Tensor) else part.read(rooms[at][: len(part)])
                    for at, part in enumerate(blocks)
                ]
                self._context.add(near, total)
                for local_rank in to:
                    blocks[local_rank].copy_(total)
        self._count(span, len(addends) - 1 + len(to))

    def _sum_spans(self, chunk: Chunk, spans: Sequence[Span], hop: int) -> Steps[None]:
        """Leave the sums over the node in this rank's spans; on later hops they are there."""
        for span in spans if hop == 0 else ():
            yield from self._sum_node(chunk, span, ())

    def _fetch(self, chunk: Chunk, span: Span, source: int) -> Steps[None]:
        """Get the span of the local rank `source`."""
        if self._shared:
            views = self._of(span)
            own, there = self._buffer(span).tensor, views[source]
            if isinstance(there, PeerTensor):
                there.read(own)
            else:
                own.copy_(there)
            self._count(span, 1)
        else:
            member, data = self._plan.members[source], self._buffer(span).bytes
            yield self._comm.receive(member, data, self._tags[chunk.index]).test

    def _publish(self, chunk: Chunk, span: Span, to: Collection[int]) -> Steps[None]:
        """Give the span to the local ranks `to`."""
        if self._shared:
            views, own = self._of(span), self._buffer(span).tensor
            for local_rank in to:
                views[local_rank].copy_(own)
            self._count(span, len(to))
        else:
            data, tag = self._buffer(span).bytes, self._tags[chunk.index]
            members = [self._plan.members[local_rank] for local_rank in to]
            yield Requests.of(*(self._comm.send(member, data, tag) for member in members)).test

    def _sum_messages(self, chunk: Chunk, span: Span, to: Collection[int]) -> Steps[None]:
        """Receive the other ranks' spans, sum them, and send the sum to the local ranks `to`."""
        total, tag = self._buffer(span).tensor, self._tags[chunk.index]
        with self._context.buffers.lease() as take:
            received = {peer: take(len(total), total.dtype) for peer in self._peers}
            receives = [
                self._comm.receive(self._plan.members[peer], buffer.bytes, tag)
                for peer, buffer in received.items()
            ]
            yield Requests.of(*receives).test
            addends = [buffer.tensor for buffer in received.values()]
            addends.insert(self._plan.local_rank, total)
            self._context.add(addends, total)
            yield from self._context.fence()
        yield from self._publish(chunk, span, to)

    def _count(self, span: Span, times: int) -> None:
        nbytes = _length(span) * self._tensor.element_size()
        self._comm.traffic.count("node", times * nbytes, messages=0)

    def _member(self, chunk: Chunk) -> Steps[None]:
        """Run a chunk by messages with its lane's owner on this node, in its order of spans."""
        plan, call, parts = self._plan, self._ticket.signature, chunk.parts
        node, rank = plan.node, self._comm.rank
        reduced, gathered = [parts[0]], list[Span]()  # of one part
        own = parts[0 if len(parts) == 1 else node]
        if len(parts) > 1:
            reduced = [span for n in (*plan.partners(0), node) for span in plan.held(chunk, n, 1)]
            for hop in reversed(range(len(plan.widths) - 1)):
                for n in reversed(plan.partners(hop)):
                    gathered += plan.held(chunk, n, hop + 1)
        owns_shard = bool(chunk.shard_owners) and chunk.shard_owners[node] == rank
        sent: Sequence[Span]
        received: Sequence[Span]
        if call.verb == "broadcast":
            sent, received = ([own], []) if call.root == rank else ([], [own])
        elif call.verb == "all_gather":
            if plan.gathers_on_ring:
                gathered = [parts[(node - step) % len(parts)] for step in range(1, len(parts))]
            sent, received = ([own], gathered) if owns_shard else ([], [own, *gathered])
        else:
            sent = reduced
            received = [own] * owns_shard if chunk.shard_owners else [own, *gathered]
        owner, tag = plan.members[chunk.lane], self._tags[chunk.index]
        for operation, spans in ((self._comm.send, sent), (self._comm.receive, received)):
            data = [self._buffer(span).bytes for span in spans]
            yield Requests.of(*(operation(owner, each, tag) for each in data)).test


def _length(span: Span) -> int:
    return span[1] - span[0]
