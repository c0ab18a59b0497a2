"""How the ranks of a node tell each other where their tensors lie, and how far they have come.

Every rank has a board in shared memory, on which only it writes:

    entered    how many collectives it has entered, each with
    place        where its tensor lies: in shared memory, in its tray, or nowhere near
    left       how many it has no more work in
    trays      room for small tensors that lie in no shared memory

A rank reads its peers' tensors once they have entered, and has its own back once they have left.
"""

import threading

import torch
from torch import Tensor

from mntrain.comm.shared_memory import NodeSharedMemory, SegmentOffset

DEPTH = 8  # collectives that a rank may have entered and not left
INLINE_BYTES = 32 << 10

_LINE = 8  # int64 in a cache line: what different ranks write lies apart
_ENTERED, _LEFT, _PLACES = 0, _LINE, 2 * _LINE
_WORDS = _PLACES + 2 * DEPTH
_HEAD_BYTES = 8 * (_WORDS + -_WORDS % _LINE)
_NOWHERE, _TRAY = -1, -2  # in place of a segment's number


class SharedFlags:
    """The boards of a node's ranks, as one of them sees them. Construction is collective.

    Collectives are numbered 0, 1, 2, ... on all ranks alike, entered and left in that order, and at
    most DEPTH at a time.
    """

    def __init__(self, memory: NodeSharedMemory, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = memory, rank, size
        self._own = memory.allocate(_HEAD_BYTES + DEPTH * INLINE_BYTES)
        self.entered = self.left = 0
        self._fenced = threading.Lock()
        self._fenced.acquire()
        place = memory.locate(self._own)
        self._shared = place is not None
        self._others = [local for local in range(size) if local != rank] if place else []
        self._boards = {rank: self._own}
        for local in self._others:
            assert place is not None
            self._boards[local] = memory.view(local, place, len(self._own), torch.uint8)
        self._words = {
            local: board[:_HEAD_BYTES].view(torch.int64).numpy()
            for local, board in self._boards.items()
        }

    def enter(self, tensor: Tensor, *, reachable: bool = True) -> None:
        """Enter the next collective with this flat tensor; a small one is copied.

        `reachable`: whether others may read and write it, or the copy. On a device they may not.
        """
        word = _PLACES + 2 * (self.entered % DEPTH)
        place = self._memory.locate(tensor) if reachable else None
        near = self._shared and reachable
        if near and place is None and tensor.numel() * tensor.element_size() <= INLINE_BYTES:
            self.tray(self.entered, tensor).copy_(tensor)
            place = SegmentOffset(_TRAY, 0)
        words = self._words[self._rank]
        words[word : word + 2] = place or (_NOWHERE, 0)
        self._fence()
        self.entered += 1
        words[_ENTERED] = self.entered

    def everyone_entered(self, number: int) -> bool:
        """Whether all ranks of the node have entered a collective. Lasting."""
        return self._all_beyond(_ENTERED, number)

    def leave(self) -> None:
        """Be done with the oldest collective that was entered."""
        self._fence()
        self.left += 1
        self._words[self._rank][_LEFT] = self.left

    def everyone_left(self, number: int) -> bool:
        """Whether all ranks of the node have left a collective. Lasting."""
        return self._all_beyond(_LEFT, number)

    def tray(self, number: int, like: Tensor) -> Tensor:
        """This rank's tray in a collective, in the dtype and length of a tensor."""
        return self._tray_of(self._rank, number, like)

    def tensors(self, number: int, mine: Tensor) -> list[Tensor] | None:
        """Everyone's tensor, by local rank; None where one is out of reach. All have entered.

        Those of others are views of their memory. For this rank it is its tray, if it uses one.
        """
        if self._size == 1:
            return [mine]
        if not self._shared:
            return None
        word = _PLACES + 2 * (number % DEPTH)
        found = []
        for local in range(self._size):
            segment, start = self._words[local][word : word + 2].tolist()
            if segment == _NOWHERE:
                return None
            if segment == _TRAY:
                found.append(self._tray_of(local, number, mine))
            elif local == self._rank:
                found.append(mine)
            else:
                place = SegmentOffset(segment, start)
                found.append(self._memory.view(local, place, mine.numel(), mine.dtype))
        return found

    def _tray_of(self, local: int, number: int, like: Tensor) -> Tensor:
        start = _HEAD_BYTES + number % DEPTH * INLINE_BYTES
        nbytes = like.numel() * like.element_size()
        return self._boards[local][start : start + nbytes].view(like.dtype)

    def _all_beyond(self, word: int, number: int) -> bool:
        if any(self._words[local][word] <= number for local in self._others):
            return False
        self._fence()
        return True

    def _fence(self) -> None:
        """Let no access to memory pass another, as a processor may: a flag its data, say.

        A lock that is released and taken again lets nothing pass, either way.
        """
        self._fenced.release()
        self._fenced.acquire()
