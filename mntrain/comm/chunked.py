"""One collective on one rank: from the caller's tensor to pieces, and back."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mntrain.comm.algorithms.chunk_plan import Chunk, HierarchyPlan
from mntrain.comm.algorithms.hierarchical import LaneOwner, NodeMember, tag_of
from mntrain.comm.algorithms.naive import NaiveSteps
from mntrain.comm.collective_call import CollectiveCall, CollectiveContext
from mntrain.comm.cuda_aware import SideStream
from mntrain.comm.intranode import CommTools, MessageAccess, SharedMemoryAccess, Steps
from mntrain.comm.mpi import TAGS
from mntrain.comm.staging import TensorAccess
from zero.collectives import Work

# Pieces under way: enough to fill a link while others compute on the core; but more than switches
# have buffers for gets lost on its way to a node to which all others send.
CHUNKS_IN_FLIGHT = 8
IN_FLIGHT_BYTES = 4 << 20


@dataclass
class DeviceContext:
    """What collectives on a device's memory have besides. One thread uses it."""

    tools: CommTools
    beside: SideStream


Hand = LaneOwner | NodeMember


class ChunkedCollective:
    """See `underway.Operation`."""

    def __init__(
        self,
        shared: CollectiveContext,
        call: CollectiveCall,
        loan: TensorAccess,
        direct: DeviceContext | None,
        *,
        light: bool,
    ) -> None:
        self._shared, self._call, self._loan = shared, call, loan
        self._tools = direct.tools if direct else shared.tools
        self._beside = direct.beside if direct else None
        self.window = max(2, min(CHUNKS_IN_FLIGHT, IN_FLIGHT_BYTES // call.choice.piece_bytes))
        self._scheme = shared.schemes.get(call.choice.algorithm)
        self.light, self.alone = light, call.choice.alone
        near = self._scheme is not None and len(self._scheme.members) > 1
        self._board = shared.board if near else None
        self._number = 0
        self._tray: Tensor | None = None  # where the result is, if it is not in the tensor

    def begin(self) -> None:
        """See `Operation.begin`."""
        self._loan.begin()

    def enter(self) -> bool:
        """See `Operation.enter`."""
        if not self._loan.here():
            return False
        if self._board is not None:
            self._number = self._board.entered
            self._board.enter(self._loan.host, reachable=self._loan.reachable)
        return True

    def ready(self) -> bool:
        """See `Operation.ready`."""
        return self._board is None or self._board.everyone_entered(self._number)

    def pieces(self) -> Iterator[tuple[int, Steps[None]]]:
        """See `Operation.pieces`."""
        if self._beside is None:
            yield from self._pieces()
            return
        for number, steps in self._pieces():
            yield number, self._beside.run(steps)

    def _pieces(self) -> Iterator[tuple[int, Steps[None]]]:
        scheme = self._scheme
        tools, tensor = self._tools, self._loan.host
        if scheme is None:
            number = self._shared.number(1)
            yield number, self._naive(NaiveSteps(tools.comm, tensor, number % TAGS))
            return
        wire = self._call.wire or tensor.dtype
        pieces = self._planned(scheme)
        first = self._shared.number(len(pieces))
        everyone: list[Tensor] | None = [tensor]
        if self._board is not None:
            everyone = self._board.tensors(self._number, tensor)
        if everyone is not None:
            mine = everyone[scheme.local_rank]
            self._tray = None if mine is tensor else mine
            near = SharedMemoryAccess(tools, scheme, everyone)
            owner = LaneOwner(tools, scheme, near, wire=wire, first=first)
            for piece in pieces:
                if piece.lane == scheme.local_rank:
                    yield first + piece.index, self._steps(owner, piece, len(pieces))
            return
        for piece in pieces:
            hand: Hand = NodeMember(tools, scheme, tensor, first)
            if piece.lane == scheme.local_rank:
                messaged = MessageAccess(tools, scheme, tensor, tag_of(first, piece))
                hand = LaneOwner(tools, scheme, messaged, wire=wire, first=first)
            yield first + piece.index, self._steps(hand, piece, len(pieces))

    def leave(self) -> None:
        """See `Operation.leave`."""
        if self._board is not None:
            self._board.leave()

    def left(self) -> bool:
        """See `Operation.left`."""
        return self._board is None or self._board.everyone_left(self._number)

    def finish(self) -> Work:
        """See `Operation.finish`: what the caller's thread waits for on the device."""
        if self._tray is not None:
            self._loan.host.copy_(self._tray)
        return self._loan.give_back()

    def _planned(self, scheme: HierarchyPlan) -> tuple[Chunk, ...]:
        call, tensor = self._call, self._loan.host
        sizes = tensor.element_size(), call.choice.piece_bytes, call.choice.pieces
        if call.verb == "all_reduce":
            return scheme.sums(len(tensor), *sizes)
        if call.verb == "broadcast":
            return scheme.copies(len(tensor), *sizes)
        return scheme.shards(call.bounds, *sizes)

    def _steps(self, hand: Hand, piece: Chunk, pieces: int) -> Steps[None]:
        if self._call.verb == "broadcast":
            return hand.copy(piece, self._call.root, pieces)
        return hand.gather(piece) if self._call.verb == "all_gather" else hand.sum(piece)

    def _naive(self, hand: NaiveSteps) -> Steps[None]:
        call = self._call
        if call.verb == "broadcast":
            return hand.copy(call.root)
        if call.verb == "all_gather":
            return hand.gather(call.bounds, self._shared.owners)
        return hand.sum(call.wire)
