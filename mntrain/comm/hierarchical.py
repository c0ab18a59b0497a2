"""The hierarchical algorithms: a call in chunks, or in one exchange of messages if it is small.

The steps of one chunk, by the rank that owns its lane on a node:

    all-reduce       reduce over the node  | sum over nodes              | publish to the node
    reduce-scatter   reduce over the node  | sum at the shard's node     | publish to its rank
    all-gather       fetch the shard       | send to the other nodes     | publish to the node
    broadcast        fetch from the root   | pass on from node to node   | publish to the node

In shared memory the owner reads and writes the tensors of the node's ranks, and they have nothing
to do. Tensors elsewhere travel within the node as messages, too.

Between two nodes, and for small tensors, every node sends its whole sum to the others, and all
nodes add all sums. Otherwise every node sums one part of the chunk, which the others send to it,
and sends them the result: the least possible number of bytes, in both directions at once, in the
latency of two messages (over a ring of M nodes: 2 (M - 1)). An all-gather goes directly as well,
unless nodes have unequal numbers of shards (see `HierarchyPlan.gathers_on_ring`).

Each level rounds a 16-bit sum once. With a wire dtype, the sum of a node is rounded to it, and so
is the sum over nodes.
"""

from collections.abc import Collection, Generator, Iterator, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mntrain.comm import small_messages
from mntrain.comm.chunk_plan import Chunk, HierarchyPlan, Span
from mntrain.comm.engine import NumberedChunk, Pipelined, Steps, Test
from mntrain.comm.mpi import Communicator, Requests
from mntrain.comm.resources import BufferView, CommContext, Take, TensorAccess, as_bytes
from mntrain.comm.ticket import Ticket
from zero.collectives import Work
from zero.kernels import sum_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Chunks in flight: enough to fill a link while other ranks compute on the core. More bytes than
# switches can buffer would be dropped on the way to a node to which all others send.
CHUNKS_IN_FLIGHT = 8
BYTES_IN_FLIGHT = 4 << 20
BLOCK_BYTES = 256 << 10  # what is summed and published while it is in the cache


def run_hierarchical(
    plan: HierarchyPlan, ticket: Ticket, access: TensorAccess, context: CommContext
) -> Pipelined | Steps[Work]:
    """Return the steps of one call on this rank, which the engine runs. Local."""
    choice = ticket.signature.choice
    assert choice is not None
    if ticket.signature.small and access.reachable:
        return small_collective(plan, ticket, access, context)
    steps = chunked_collective(plan, ticket, access, context)
    most = max(2, min(CHUNKS_IN_FLIGHT, BYTES_IN_FLIGHT // choice.chunk_bytes))
    return Pipelined(steps, most, latency_bound=not choice.concurrent)


def chunked_collective(
    plan: HierarchyPlan, ticket: Ticket, access: TensorAccess, context: CommContext
) -> Generator[Test | Iterator[NumberedChunk], None, Work]:
    """Run a call on a flat tensor, cut into the chunks of a plan, as `engine.Pipelined`."""
    flags = context.flags if len(plan.members) > 1 else None
    access.begin()
    yield access.here
    tensor = access.host
    number = flags.enter(tensor, ticket.digest, reachable=access.reachable) if flags else 0
    yield lambda: flags is None or flags.all_entered(number)
    tensors = flags.tensors(number, tensor) if flags else [tensor]
    yield _chunks(plan, ticket, access, context, tensors)
    if flags:
        flags.leave()
    yield lambda: flags is None or flags.all_left(number)
    if tensors is not None and tensors[plan.local_rank] is not tensor:  # an inline slot
        tensor.copy_(tensors[plan.local_rank])
    return access.give_back()


def _chunks(
    plan: HierarchyPlan,
    ticket: Ticket,
    access: TensorAccess,
    context: CommContext,
    tensors: Sequence[Tensor] | None,
) -> Iterator[NumberedChunk]:
    """Yield the chunks in which this rank takes part. `tensors`: see `LaneOwner`."""
    call, tensor = ticket.signature, access.host
    assert call.choice is not None
    sizes = tensor.element_size(), call.choice.chunk_bytes, call.choice.min_chunks
    if call.verb == "all_reduce":
        chunks = plan.all_reduce(len(tensor), *sizes)
    elif call.verb == "broadcast":
        chunks = plan.broadcast(len(tensor), *sizes)
    else:
        chunks = plan.by_shard(access.bounds, *sizes)
    first, tags = context.comm.tags(ticket.digest, len(chunks))
    wire = call.wire or tensor.dtype
    owner = LaneOwner(context, plan, tensor, tensors, wire=wire, tags=tags)
    for chunk in chunks:
        if chunk.lane == plan.local_rank:
            if call.verb == "broadcast":
                steps = owner.broadcast(chunk, call.root, len(chunks))
            elif call.verb == "all_gather":
                steps = owner.all_gather(chunk)
            else:
                steps = owner.reduce(chunk)
        elif tensors is None:
            tag, comm = tags[chunk.index], context.comm
            steps = member_steps(plan, ticket, tensor, chunk, tag=tag, comm=comm)
        else:
            continue
        yield first + chunk.index, context.run(steps)


class LaneOwner:
    """The steps of the rank that owns a lane on its node, for the chunks of one collective.

    `tensors` are those of the node's ranks in shared memory; None: they are out of reach, and the
    other ranks run `member_steps`. `wire` is the dtype between nodes.
    """

    def __init__(
        self,
        context: CommContext,
        plan: HierarchyPlan,
        tensor: Tensor,
        tensors: Sequence[Tensor] | None,
        *,
        wire: torch.dtype,
        tags: Sequence[int],
    ) -> None:
        self._context, self._comm = context, context.comm
        self._plan, self._tags = plan, tags
        self._shared = tensors is not None
        self._tensors = [tensor] if tensors is None else tensors
        self._self = plan.local_rank if self._shared else 0  # index of the own tensor
        self._bytes = as_bytes(self._tensors[self._self])
        self._views: dict[Span, Sequence[Tensor]] = {}
        self._wire, self._casts = wire, wire != tensor.dtype
        self._own = plan.node
        self._peers = [local for local in range(len(plan.members)) if local != plan.local_rank]
        count = len(plan.nodes.nodes)
        # The next node first, so that every node receives from one other at a time.
        self._others = [(self._own + step) % count for step in range(1, count)]

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
        """Send this node's part to the others, directly or along a ring, and receive theirs."""
        ring = self._plan.gathers_on_ring
        receivers = self._others[:1] if ring else self._others
        arriving = {
            node: self._receive(chunk, self._others[-1] if ring else node, self._buffer(part))
            for node in reversed(self._others)
            if _length(part := chunk.parts[node])
        }
        own, owner = chunk.parts[self._own], chunk.shard_owners[self._own]
        sends = []
        if _length(own):
            source = self._plan.nodes.local_rank(owner)
            if source != self._plan.local_rank:
                yield from self._fetch(chunk, own, source)
            buffer = self._buffer(own)
            sends = [self._send(chunk, node, buffer) for node in receivers]
            yield from self._publish(chunk, own, [p for p in self._peers if p != source])
        for node, requests in arriving.items():
            yield requests.test
            if ring and node != self._others[0]:
                sends.append(self._send(chunk, self._others[0], self._buffer(chunk.parts[node])))
            yield from self._publish(chunk, chunk.parts[node], self._peers)
        yield Requests.of(*sends).test

    def broadcast(self, chunk: Chunk, root: int, chunks: int) -> Steps[None]:
        """Pass on one of `chunks` chunks from the node before to the nodes after."""
        (span,) = chunk.parts
        before, after = self._plan.route(root, chunks)
        peers = self._peers
        if before is not None:
            yield self._receive(chunk, before, self._buffer(span)).test
        elif root != self._comm.rank:
            source = self._plan.nodes.local_rank(root)
            yield from self._fetch(chunk, span, source)
            peers = [peer for peer in peers if peer != source]
        buffer = self._buffer(span)
        sends = Requests.of(*(self._send(chunk, node, buffer) for node in after))
        yield from self._publish(chunk, span, peers)
        yield sends.test

    def _reduce_whole(self, chunk: Chunk) -> Steps[None]:
        """Send this node's sum to every other node, and add all."""
        (span,) = chunk.parts
        with self._context.buffers.lease() as take:
            length, others = _length(span), reversed(self._others)
            sums = {node: take(length, self._wire) for node in others}
            cast = self._cast_buffer(take, span)
            receives = [self._receive(chunk, node, buffer) for node, buffer in sums.items()]
            yield from self._sum_node(chunk, span, ())
            own = yield from self._for_wire(span, cast)
            sends = self._send_to_others(chunk, own)
            yield Requests.of(*receives, sends).test
            yield from self._add_nodes(span, own, sums)
            yield from self._publish(chunk, span, self._peers)

    def _reduce_parts(self, chunk: Chunk) -> Steps[None]:
        """Send every node its part of this node's sum, sum this node's part, and send it to all."""
        own_part = chunk.parts[self._own]
        with self._context.buffers.lease() as take:
            length, others = _length(own_part), reversed(self._others)
            sums = {node: take(length, self._wire) for node in others}
            casts = [self._cast_buffer(take, part) for part in chunk.parts]
            expected = sums.items() if length else ()
            receives = [self._receive(chunk, node, buffer) for node, buffer in expected]
            sends = {}
            for node in self._others:
                if _length(chunk.parts[node]):
                    yield from self._sum_node(chunk, chunk.parts[node], ())
                    buffer = yield from self._for_wire(chunk.parts[node], casts[node])
                    sends[node] = self._send(chunk, node, buffer)
            if length:
                yield Requests.of(*receives).test
                yield from self._sum_node(chunk, own_part, ())  # after the sends have started
                own = yield from self._for_wire(own_part, casts[self._own])
                yield from self._add_nodes(own_part, own, sums)
            if chunk.shard_owners:
                if length:
                    yield from self._publish(chunk, own_part, self._receivers(chunk))
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
            buffer = casts[node] or self._buffer(chunk.parts[node])
            receives[node] = self._receive(chunk, node, buffer)
        yield from self._publish(chunk, own_part, self._peers)
        for node, requests in receives.items():
            yield requests.test
            part, cast = chunk.parts[node], casts[node]
            if cast is not None:
                self._buffer(part).tensor.copy_(cast.tensor)
                yield from self._context.fence()
            yield from self._publish(chunk, part, self._peers)
        yield result_sends.test

    def _add_nodes(self, span: Span, own: BufferView, others: dict[int, BufferView]) -> Steps[None]:
        """Leave the sum over nodes in this rank's span, rounded to the wire dtype."""
        by_node = {self._own: own, **others}
        total = self._buffer(span).tensor
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
            return self._buffer(span)
        cast.tensor.copy_(self._buffer(span).tensor)
        yield from self._context.fence()
        return cast

    def _cast_buffer(self, take: Take, span: Span) -> BufferView | None:
        """Return a buffer for this node's data of a span, if the wire dtype differs."""
        return take(_length(span), self._wire) if self._casts else None

    def _send_to_others(self, chunk: Chunk, buffer: BufferView) -> Requests:
        nodes = self._others if buffer.bytes.nbytes else []
        return Requests.of(*(self._send(chunk, node, buffer) for node in nodes))

    def _send(self, chunk: Chunk, node: int, buffer: BufferView) -> Requests:
        owner = self._plan.lane_owners[chunk.lane][node]
        return self._comm.send(owner, buffer.bytes, self._tags[chunk.index])

    def _receive(self, chunk: Chunk, node: int, buffer: BufferView) -> Requests:
        owner = self._plan.lane_owners[chunk.lane][node]
        return self._comm.receive(owner, buffer.bytes, self._tags[chunk.index])

    def _of(self, span: Span) -> Sequence[Tensor]:
        """Return a span of every tensor within reach."""
        views = self._views.get(span)
        if views is None:
            low, high = span
            views = self._views[span] = [tensor[low:high] for tensor in self._tensors]
        return views

    def _buffer(self, span: Span) -> BufferView:
        """Return a view of a span of this rank's tensor."""
        low, high = span
        view = self._of(span)[self._self]
        size = view.element_size()
        return BufferView(view, self._bytes[low * size : high * size])

    # Within the node. In shared memory these steps never wait: all ranks have entered.

    def _sum_node(self, chunk: Chunk, span: Span, to: Collection[int]) -> Steps[None]:
        """Leave the sum over the node in the spans of this rank and of the local ranks `to`."""
        if not self._shared:
            yield from self._sum_messages(chunk, span, to)
            return
        addends, block = self._of(span), BLOCK_BYTES // self._tensors[0].element_size()
        if len(addends) == 1:
            return
        parts = zip(*(view.split(block) for view in addends), strict=True) if to else [addends]
        for blocks in parts:
            total = blocks[self._self]
            self._context.add(blocks, total)
            for local_rank in to:
                blocks[local_rank].copy_(total)
        self._count(span, len(addends) - 1 + len(to))

    def _fetch(self, chunk: Chunk, span: Span, source: int) -> Steps[None]:
        """Get the span of the local rank `source`."""
        if self._shared:
            views = self._of(span)
            views[self._self].copy_(views[source])
            self._count(span, 1)
        else:
            member, data = self._plan.members[source], self._buffer(span).bytes
            yield self._comm.receive(member, data, self._tags[chunk.index]).test

    def _publish(self, chunk: Chunk, span: Span, to: Collection[int]) -> Steps[None]:
        """Give the span to the local ranks `to`."""
        if self._shared:
            views = self._of(span)
            for local_rank in to:
                views[local_rank].copy_(views[self._self])
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
        nbytes = _length(span) * self._tensors[0].element_size()
        self._comm.traffic.bytes["node"] += times * nbytes


def member_steps(
    plan: HierarchyPlan,
    ticket: Ticket,
    tensor: Tensor,
    chunk: Chunk,
    *,
    tag: int,
    comm: Communicator,
) -> Steps[None]:
    """Run a chunk by messages with its lane's owner on this node, in the owner's order of spans."""
    call, parts, count = ticket.signature, chunk.parts, len(chunk.parts)
    own = parts[plan.node if count > 1 else 0]
    after = [parts[(plan.node + step) % count] for step in range(1, count)]
    owns_shard = bool(chunk.shard_owners) and chunk.shard_owners[plan.node] == comm.rank
    sent: Sequence[Span]
    received: Sequence[Span]
    if call.verb == "broadcast":
        sent, received = (parts, ()) if call.root == comm.rank else ((), parts)
    elif call.verb == "all_gather":
        before = after[::-1]
        sent, received = ([own], before) if owns_shard else ([], [own, *before])
    else:
        sent = [*after, own]
        received = [own] * owns_shard if chunk.shard_owners else [own, *after]
    owner = plan.members[chunk.lane]
    for operation, spans in ((comm.send, sent), (comm.receive, received)):
        data = [as_bytes(tensor[slice(*span)]) for span in spans]
        yield Requests.of(*(operation(owner, each, tag) for each in data)).test


def small_collective(
    plan: HierarchyPlan, ticket: Ticket, access: TensorAccess, context: CommContext
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
    call, tensor, comm = ticket.signature, access.host, context.comm
    tag = comm.tag(ticket.digest)
    if call.verb == "broadcast":
        yield from small_messages.broadcast(comm, as_bytes(tensor), call.root, tag)
        return access.give_back()
    with context.buffers.lease() as take:
        rows = take(tensor.numel(), tensor.dtype, comm.size)
        if rows.arrays:
            rows.arrays[comm.rank][:] = tensor.numpy()
        else:
            rows.tensors[comm.rank].copy_(tensor)
        yield from small_messages.all_gather(comm, rows.bytes, tag)
        if call.verb == "all_gather":
            owners = zip(pairwise(access.bounds), context.topology.owners, strict=True)
            for (low, high), owner in owners:
                tensor[low:high].copy_(rows.tensors[owner][low:high])
        else:  # a reduce-scatter leaves the sums of all shards on every rank
            _add_rows(rows, plan.nodes.nodes, tensor, call.wire or tensor.dtype, context)
    return access.give_back()


def _add_rows(
    rows: BufferView,
    nodes: Sequence[Sequence[int]],
    total: Tensor,
    wire: torch.dtype,
    context: CommContext,
) -> None:
    """Leave the sum over nodes of the sums over their ranks in `total`. Overwrites the rows."""
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


def _length(span: Span) -> int:
    return span[1] - span[0]
