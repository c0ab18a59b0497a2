"""What becomes of a piece: the four verbs, as steps of the rank that owns the piece's lane.

    all-reduce       sum over the node | sum over nodes            | hand to the node
    reduce-scatter   sum over the node | sum at the shard's node   | hand to the shard's rank
    all-gather       take the shard    | hand to the other nodes   | hand to the node
    broadcast        take it from root | pass on from node to node | hand to the node

Between two nodes, or for little, each sends its whole sum, and all add all. Else every node sums a
part of the piece, which the others send it, and sends them the result: the least that can be sent,
in two messages' time, both ways at once. (A ring sends as much, but adds each part in another
order, and takes 2 (M - 1) messages' time over M nodes.)

Each level rounds a 16-bit sum once. With a wire dtype, a node's sum is rounded to it, and so is the
sum over nodes.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mntrain.collectives.near import Near, Steps, Tools
from mntrain.collectives.plan import Part, Piece, Scheme
from mntrain.collectives.sums import as_bytes
from mntrain.mpi import TAGS, Flight

if TYPE_CHECKING:
    from mntrain.mpi import Bytes


class Owner:
    """The steps of a lane's owner, for the pieces of one collective.

    `tensor` is this rank's, in host memory; `wire` the dtype in which it travels between nodes.
    `first` is the first piece's number among all of the world's.
    """

    def __init__(
        self,
        tools: Tools,
        scheme: Scheme,
        near: Near,
        tensor: Tensor,
        *,
        wire: torch.dtype,
        first: int,
    ) -> None:
        self._comm, self._scratch, self._adder = tools.comm, tools.scratch, tools.adder
        self._fence = tools.fence
        self._scheme, self._near, self._tensor = scheme, near, tensor
        self._wire = wire
        self._first = first
        self._here, self._node = scheme.local_rank, scheme.node
        self._peers = [local for local in range(len(scheme.members)) if local != self._here]
        count = len(scheme.nodes.nodes)
        # The next node first: so at every moment each is sent to by one.
        self._others = [(self._node + step) % count for step in range(1, count)]

    def sum(self, piece: Piece) -> Steps[None]:
        """All-reduce (no ranks), or reduce-scatter (to the piece's ranks)."""
        if not self._others:
            (part,) = piece.parts
            yield from self._near.sum(part, self._receivers(piece))
        elif len(piece.parts) == 1:
            yield from self._exchange(piece)
        else:
            yield from self._sum_parts(piece)

    def gather(self, piece: Piece) -> Steps[None]:
        """All-gather: this node's part to the others, theirs here."""
        arriving = {
            node: self._receive(piece, node, self._data(piece.parts[node]))
            for node in reversed(self._others)
            if _length(piece.parts[node])
        }
        mine, holder = piece.parts[self._node], piece.ranks[self._node]
        leaving = Flight.of()
        if _length(mine):
            source = self._scheme.nodes.local_rank(holder)
            if source != self._here:
                yield from self._near.take(mine, source)
            leaving = self._send_to_others(piece, self._data(mine))
            yield from self._near.give(mine, [p for p in self._peers if p != source])
        for node, flight in arriving.items():
            yield flight.over
            yield from self._near.give(piece.parts[node], self._peers)
        yield leaving.over

    def copy(self, piece: Piece, root: int, pieces: int) -> Steps[None]:
        """Broadcast of one of so many pieces: from the node before to the nodes after."""
        (part,) = piece.parts
        before, after = self._scheme.route(root, pieces)
        peers = self._peers
        if before is not None:
            yield self._receive(piece, before, self._data(part)).over
        elif root != self._comm.rank:
            source = self._scheme.nodes.local_rank(root)
            yield from self._near.take(part, source)
            peers = [peer for peer in peers if peer != source]
        leaving = Flight.of(*(self._send(piece, node, self._data(part)) for node in after))
        yield from self._near.give(part, peers)
        yield leaving.over

    def _exchange(self, piece: Piece) -> Steps[None]:
        """Send this node's sum to every other node, and add all."""
        (part,) = piece.parts
        with self._rooms(part, len(self._others)) as rooms, self._room(part) as spare:
            arriving = [
                self._receive(piece, node, room)
                for node, room in zip(reversed(self._others), rooms, strict=True)
            ]
            yield from self._near.sum(part, ())
            own = yield from self._for_wire(part, spare)
            leaving = self._send_to_others(piece, own)
            yield Flight.of(*arriving, leaving).over
            yield from self._add_nodes(
                part, own, dict(zip(reversed(self._others), rooms, strict=True))
            )
            yield from self._near.give(part, self._peers)

    def _sum_parts(self, piece: Piece) -> Steps[None]:
        """Send every node its part of this node's sum; sum what they send; send them the result."""
        mine = piece.parts[self._node]
        with ExitStack() as stack:
            rooms = stack.enter_context(self._rooms(mine, len(self._others)))
            spares = [stack.enter_context(self._room(part)) for part in piece.parts]
            theirs = dict(zip(reversed(self._others), rooms, strict=True))
            arriving = [
                self._receive(piece, node, room) for node, room in theirs.items() if len(room)
            ]
            leaving = {}
            for node in self._others:
                if _length(piece.parts[node]):
                    yield from self._near.sum(piece.parts[node], ())
                    data = yield from self._for_wire(piece.parts[node], spares[node])
                    leaving[node] = self._send(piece, node, data)
            if _length(mine):
                yield from self._near.sum(mine, ())
                yield Flight.of(*arriving).over
                own = yield from self._for_wire(mine, spares[self._node])
                yield from self._add_nodes(mine, own, theirs)
            if piece.ranks:
                if _length(mine):
                    yield from self._near.give(mine, self._receivers(piece))
                yield Flight.of(*leaving.values()).over
                return
            wired = yield from self._for_wire(mine, spares[self._node])
            results = self._send_to_others(piece, wired)
            arriving_results = {}
            for node, flight in leaving.items():
                yield flight.over  # what left makes room for what comes back
                room = self._wired(piece.parts[node], spares[node])
                arriving_results[node] = self._receive(piece, node, room)
            yield from self._near.give(mine, self._peers)
            for node, flight in arriving_results.items():
                yield flight.over
                part = piece.parts[node]
                self._tensor[slice(*part)].copy_(self._wired(part, spares[node]))
                yield from self._fence()
                yield from self._near.give(part, self._peers)
            yield results.over

    def _add_nodes(self, part: Part, own: Tensor, theirs: dict[int, Tensor]) -> Steps[None]:
        """Leave the sum over nodes in this rank's part; round it as one that travels."""
        sums = [own if node == self._node else theirs[node] for node in range(len(theirs) + 1)]
        total = self._data(part)
        self._adder.add(sums, total, self._node if own.dtype == total.dtype else None)
        if self._wire != total.dtype:
            total.copy_(total.to(self._wire))
        yield from self._fence()

    def _receivers(self, piece: Piece) -> list[int]:
        """To whom in the node a sum goes, by local rank."""
        if not piece.ranks:
            return self._peers
        to = self._scheme.nodes.local_rank(piece.ranks[self._node])
        return [to] if to != self._here else []

    def _data(self, part: Part) -> Tensor:
        low, high = part
        return self._tensor[low:high]

    def _wired(self, part: Part, spare: Tensor) -> Tensor:
        """Where a part travels: in its own memory, or in a spare of the wire's dtype."""
        return self._data(part) if self._wire == self._tensor.dtype else spare

    def _for_wire(self, part: Part, spare: Tensor) -> Steps[Tensor]:
        """A part as it travels."""
        wired = self._wired(part, spare)
        if wired is spare:
            wired.copy_(self._data(part))
            yield from self._fence()
        return wired

    def _room(self, part: Part) -> AbstractContextManager[Tensor]:
        """A spare for a part, if it travels in another dtype."""
        needed = _length(part) if self._wire != self._tensor.dtype else 0
        return self._scratch.lend(needed, self._wire)

    @contextmanager
    def _rooms(self, part: Part, count: int) -> Iterator[Sequence[Tensor]]:
        """Memory for so many of others' parts."""
        with ExitStack() as stack:
            lend = self._scratch.lend
            yield [stack.enter_context(lend(_length(part), self._wire)) for _ in range(count)]

    def _send_to_others(self, piece: Piece, data: Tensor) -> Flight:
        if not len(data):
            return Flight.of()
        return Flight.of(*(self._send(piece, node, data) for node in self._others))

    def _send(self, piece: Piece, node: int, data: Tensor) -> Flight:
        owner = self._scheme.owners[piece.lane][node]
        return self._comm.send(owner, as_bytes(data), tag_of(self._first, piece))

    def _receive(self, piece: Piece, node: int, data: Tensor) -> Flight:
        owner = self._scheme.owners[piece.lane][node]
        return self._comm.receive(owner, as_bytes(data), tag_of(self._first, piece))


class Follower:
    """The steps of the other members of a node in which everything goes by messages.

    They send what the owner of the piece's lane asks for (`MessagedNear`), and take what it gives,
    in the owner's order.
    """

    def __init__(self, tools: Tools, scheme: Scheme, tensor: Tensor, first: int) -> None:
        self._comm, self._scheme, self._tensor = tools.comm, scheme, tensor
        self._first, self._node = first, scheme.node

    def sum(self, piece: Piece) -> Steps[None]:
        """See `Owner.sum`."""
        parts = piece.parts
        after = [(self._node + step) % len(parts) for step in range(1, len(parts))]
        node = self._node if len(parts) > 1 else 0
        yield from self._send(piece, [*(parts[other] for other in after), parts[node]])
        if not piece.ranks:
            yield from self._receive(piece, [parts[node], *(parts[other] for other in after)])
        elif piece.ranks[node] == self._comm.rank:
            yield from self._receive(piece, [parts[node]])

    def gather(self, piece: Piece) -> Steps[None]:
        """See `Owner.gather`."""
        parts, node = piece.parts, self._node
        before = [(node - step) % len(parts) for step in range(1, len(parts))]
        wanted = [parts[other] for other in before]
        if piece.ranks[node] == self._comm.rank:
            yield from self._send(piece, [parts[node]])
        else:
            wanted.insert(0, parts[node])
        yield from self._receive(piece, wanted)

    def copy(self, piece: Piece, root: int, pieces: int) -> Steps[None]:
        """See `Owner.copy`."""
        if root == self._comm.rank:
            yield from self._send(piece, piece.parts)
        else:
            yield from self._receive(piece, piece.parts)

    def _send(self, piece: Piece, parts: Sequence[Part]) -> Steps[None]:
        owner, tag = self._owner(piece), tag_of(self._first, piece)
        yield Flight.of(*(self._comm.send(owner, self._data(p), tag) for p in parts)).over

    def _receive(self, piece: Piece, parts: Sequence[Part]) -> Steps[None]:
        owner, tag = self._owner(piece), tag_of(self._first, piece)
        yield Flight.of(*(self._comm.receive(owner, self._data(p), tag) for p in parts)).over

    def _owner(self, piece: Piece) -> int:
        return self._scheme.members[piece.lane]

    def _data(self, part: Part) -> "Bytes":
        return as_bytes(self._tensor[slice(*part)])


def tag_of(first: int, piece: Piece) -> int:
    """The tag of a piece's messages; no two pieces under way have the same (see `progress`)."""
    return (first + piece.index) % TAGS


def _length(part: Part) -> int:
    return part[1] - part[0]
