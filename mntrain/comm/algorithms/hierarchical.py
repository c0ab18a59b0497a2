"""What becomes of a piece: the four verbs, as steps of the rank that owns the piece's lane.

    all-reduce       sum over the node | sum over nodes            | hand to the node
    reduce-scatter   sum over the node | sum at the shard's node   | hand to the shard's rank
    all-gather       take the shard    | hand to the other nodes   | hand to the node
    broadcast        take it from root | pass on from node to node | hand to the node

Between two nodes, or for little, each sends its whole sum, and all add all. Else every node sums a
part of the piece, which the others send it, and sends them the result: the least that can be sent,
in two messages' time, both ways at once. (A ring sends as much, but adds each part in another
order, and takes 2 (M - 1) messages' time over M nodes.) An all-gather goes directly as well, but on
a ring where some nodes have more shards than others: there direct sends are more than need be.

Each level rounds a 16-bit sum once. With a wire dtype, a node's sum is rounded to it, and so is the
sum over nodes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mntrain.comm.algorithms.chunk_plan import Chunk, HierarchyPlan, Span
from mntrain.comm.buffers import BufferView, Lease
from mntrain.comm.intranode import CommTools, IntranodeAccess, Steps
from mntrain.comm.mpi import TAGS, Requests
from mntrain.comm.reduction import as_bytes

if TYPE_CHECKING:
    from mntrain.comm.mpi import Bytes


class LaneOwner:
    """The steps of a lane's owner, for the pieces of one collective.

    `near` has the tensor, which travels between nodes in the dtype `wire`.
    `first` is the first piece's number among all of the world's.
    """

    def __init__(
        self,
        tools: CommTools,
        scheme: HierarchyPlan,
        near: IntranodeAccess,
        *,
        wire: torch.dtype,
        first: int,
    ) -> None:
        self._comm, self._scratch, self._adder = tools.comm, tools.scratch, tools.adder
        self._fence = tools.fence
        self._scheme, self._near, self._first = scheme, near, first
        self._wire, self._narrows = wire, wire != near.dtype
        self._here, self._node = scheme.local_rank, scheme.node
        self._peers = [local for local in range(len(scheme.members)) if local != self._here]
        count = len(scheme.nodes.nodes)
        # The next node first: so at every moment each is sent to by one.
        self._others = [(self._node + step) % count for step in range(1, count)]

    def sum(self, piece: Chunk) -> Steps[None]:
        """All-reduce (no ranks), or reduce-scatter (to the piece's ranks)."""
        if not self._others:
            (part,) = piece.parts
            yield from self._near.sum(part, self._receivers(piece))
        elif len(piece.parts) == 1:
            yield from self._exchange(piece)
        else:
            yield from self._sum_parts(piece)

    def gather(self, piece: Chunk) -> Steps[None]:
        """All-gather: this node's part to the others, theirs here.

        Directly, or on a ring: then each passes on to the next node what the one before has sent.
        """
        ring = self._scheme.uneven
        receivers = self._others[:1] if ring else self._others
        arriving = {
            node: self._receive(piece, self._others[-1] if ring else node, self._near.data(part))
            for node in reversed(self._others)
            if _length(part := piece.parts[node])
        }
        mine, holder = piece.parts[self._node], piece.ranks[self._node]
        leaving = []
        if _length(mine):
            source = self._scheme.nodes.local_rank(holder)
            if source != self._here:
                yield from self._near.take(mine, source)
            data = self._near.data(mine)
            leaving = [self._send(piece, node, data) for node in receivers]
            yield from self._near.give(mine, [p for p in self._peers if p != source])
        for node, flight in arriving.items():
            yield flight.over
            if ring and node != self._others[0]:
                leaving.append(
                    self._send(piece, self._others[0], self._near.data(piece.parts[node]))
                )
            yield from self._near.give(piece.parts[node], self._peers)
        yield Requests.of(*leaving).over

    def copy(self, piece: Chunk, root: int, pieces: int) -> Steps[None]:
        """Broadcast of one of so many pieces: from the node before to the nodes after."""
        (part,) = piece.parts
        before, after = self._scheme.route(root, pieces)
        peers = self._peers
        if before is not None:
            yield self._receive(piece, before, self._near.data(part)).over
        elif root != self._comm.rank:
            source = self._scheme.nodes.local_rank(root)
            yield from self._near.take(part, source)
            peers = [peer for peer in peers if peer != source]
        data = self._near.data(part)
        leaving = Requests.of(*(self._send(piece, node, data) for node in after))
        yield from self._near.give(part, peers)
        yield leaving.over

    def _exchange(self, piece: Chunk) -> Steps[None]:
        """Send this node's sum to every other node, and add all."""
        (part,) = piece.parts
        with self._scratch.lend() as lent:
            theirs = {node: self._room(lent, part) for node in reversed(self._others)}
            spare = self._spare(lent, part)
            arriving = [self._receive(piece, node, room) for node, room in theirs.items()]
            yield from self._near.sum(part, ())
            own = yield from self._for_wire(part, spare)
            leaving = self._send_to_others(piece, own)
            yield Requests.of(*arriving, leaving).over
            yield from self._add_nodes(part, own, theirs)
            yield from self._near.give(part, self._peers)

    def _sum_parts(self, piece: Chunk) -> Steps[None]:
        """Send every node its part of this node's sum; sum what they send; send them the result."""
        mine = piece.parts[self._node]
        with self._scratch.lend() as lent:
            theirs = {node: self._room(lent, mine) for node in reversed(self._others)}
            spares = [self._spare(lent, part) for part in piece.parts]
            arriving = []
            if _length(mine):
                arriving = [self._receive(piece, node, room) for node, room in theirs.items()]
            leaving = {}
            for node in self._others:
                if _length(piece.parts[node]):
                    yield from self._near.sum(piece.parts[node], ())
                    data = yield from self._for_wire(piece.parts[node], spares[node])
                    leaving[node] = self._send(piece, node, data)
            if _length(mine):
                yield Requests.of(*arriving).over
                yield from self._near.sum(mine, ())  # when all that leaves is on its way
                own = yield from self._for_wire(mine, spares[self._node])
                yield from self._add_nodes(mine, own, theirs)
            if piece.ranks:
                if _length(mine):
                    yield from self._near.give(mine, self._receivers(piece))
                yield Requests.of(*leaving.values()).over
                return
            wired = yield from self._for_wire(mine, spares[self._node])
            results = self._send_to_others(piece, wired)
            arriving_results = {}
            for node, flight in leaving.items():
                yield flight.over  # what left makes room for what comes back
                room = spares[node] or self._near.data(piece.parts[node])
                arriving_results[node] = self._receive(piece, node, room)
            yield from self._near.give(mine, self._peers)
            for node, flight in arriving_results.items():
                yield flight.over
                part, spare = piece.parts[node], spares[node]
                if spare is not None:
                    self._near.data(part).tensor.copy_(spare.tensor)
                    yield from self._fence()
                yield from self._near.give(part, self._peers)
            yield results.over

    def _add_nodes(self, part: Span, own: BufferView, theirs: dict[int, BufferView]) -> Steps[None]:
        """Leave the sum over nodes in this rank's part; round it as one that travels."""
        everyone = {self._node: own, **theirs}
        total = self._near.data(part).tensor
        sums = [everyone[node].tensor for node in range(len(everyone))]
        self._adder.add(sums, total, None if self._narrows else self._node)
        if self._narrows:
            total.copy_(total.to(self._wire))
        yield from self._fence()

    def _receivers(self, piece: Chunk) -> list[int]:
        """To whom in the node a sum goes, by local rank."""
        if not piece.ranks:
            return self._peers
        to = self._scheme.nodes.local_rank(piece.ranks[self._node])
        return [to] if to != self._here else []

    def _for_wire(self, part: Span, spare: BufferView | None) -> Steps[BufferView]:
        """A part as it travels: in its own memory, or in a spare of the wire's dtype."""
        if spare is None:
            return self._near.data(part)
        spare.tensor.copy_(self._near.data(part).tensor)
        yield from self._fence()
        return spare

    def _room(self, lent: Lease, part: Span) -> BufferView:
        """Memory for another's part, as it travels."""
        return lent.data(_length(part), self._wire)

    def _spare(self, lent: Lease, part: Span) -> BufferView | None:
        """Memory for this rank's, if it travels in another dtype."""
        return self._room(lent, part) if self._narrows else None

    def _send_to_others(self, piece: Chunk, data: BufferView) -> Requests:
        if not data.bytes.nbytes:
            return Requests.of()
        return Requests.of(*(self._send(piece, node, data) for node in self._others))

    def _send(self, piece: Chunk, node: int, data: BufferView) -> Requests:
        owner = self._scheme.owners[piece.lane][node]
        return self._comm.send(owner, data.bytes, tag_of(self._first, piece))

    def _receive(self, piece: Chunk, node: int, data: BufferView) -> Requests:
        owner = self._scheme.owners[piece.lane][node]
        return self._comm.receive(owner, data.bytes, tag_of(self._first, piece))


class NodeMember:
    """The steps of the other members of a node in which everything goes by messages.

    They send what the owner of the piece's lane asks for (`MessagedNear`), and take what it gives,
    in the owner's order.
    """

    def __init__(self, tools: CommTools, scheme: HierarchyPlan, tensor: Tensor, first: int) -> None:
        self._comm, self._scheme, self._tensor = tools.comm, scheme, tensor
        self._first, self._node = first, scheme.node

    def sum(self, piece: Chunk) -> Steps[None]:
        """See `LaneOwner.sum`."""
        parts = piece.parts
        after = [(self._node + step) % len(parts) for step in range(1, len(parts))]
        node = self._node if len(parts) > 1 else 0
        yield from self._send(piece, [*(parts[other] for other in after), parts[node]])
        if not piece.ranks:
            yield from self._receive(piece, [parts[node], *(parts[other] for other in after)])
        elif piece.ranks[node] == self._comm.rank:
            yield from self._receive(piece, [parts[node]])

    def gather(self, piece: Chunk) -> Steps[None]:
        """See `LaneOwner.gather`."""
        parts, node = piece.parts, self._node
        before = [(node - step) % len(parts) for step in range(1, len(parts))]
        wanted = [parts[other] for other in before]
        if piece.ranks[node] == self._comm.rank:
            yield from self._send(piece, [parts[node]])
        else:
            wanted.insert(0, parts[node])
        yield from self._receive(piece, wanted)

    def copy(self, piece: Chunk, root: int, pieces: int) -> Steps[None]:
        """See `LaneOwner.copy`."""
        if root == self._comm.rank:
            yield from self._send(piece, piece.parts)
        else:
            yield from self._receive(piece, piece.parts)

    def _send(self, piece: Chunk, parts: Sequence[Span]) -> Steps[None]:
        owner, tag = self._owner(piece), tag_of(self._first, piece)
        yield Requests.of(*(self._comm.send(owner, self._data(p), tag) for p in parts)).over

    def _receive(self, piece: Chunk, parts: Sequence[Span]) -> Steps[None]:
        owner, tag = self._owner(piece), tag_of(self._first, piece)
        yield Requests.of(*(self._comm.receive(owner, self._data(p), tag) for p in parts)).over

    def _owner(self, piece: Chunk) -> int:
        return self._scheme.members[piece.lane]

    def _data(self, part: Span) -> "Bytes":
        return as_bytes(self._tensor[slice(*part)])


def tag_of(first: int, piece: Chunk) -> int:
    """The tag of a piece's messages; no two pieces under way have the same (see `progress`)."""
    return (first + piece.index) % TAGS


def _length(part: Span) -> int:
    return part[1] - part[0]
