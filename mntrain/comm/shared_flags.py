"""Flags in shared memory: which collectives the ranks of a node have entered and left.

Every rank has a block in shared memory, to which only it writes:

    entered    the number of collectives that it has entered, and for each of the last DEPTH
    location     where its tensor lies: in shared memory, in an inline slot, or out of reach
    left       the number of collectives in which it has no work left
    slots      DEPTH inline slots for small tensors outside of shared memory

A rank accesses its peers' tensors after all have entered, and owns its own tensor again after all
have left.
"""

import threading

import torch
from torch import Tensor

from mntrain.comm.shared_memory import NodeSharedMemory, SegmentOffset

DEPTH = 8  # collectives that a rank may have entered and not left
INLINE_BYTES = 32 << 10

_LINE = 8  # int64 in a cache line, so that ranks do not write to the same line
_ENTERED, _LEFT, _LOCATIONS = 0, _LINE, 2 * _LINE
_WORDS = _LOCATIONS + 2 * DEPTH
_HEAD_BYTES = 8 * (_WORDS + -_WORDS % _LINE)
_UNREACHABLE, _INLINE = -1, -2  # in place of a segment's number


class SharedFlags:
    """The flags of a node's ranks, as one rank sees them. Construction is collective.

    Collectives are numbered 0, 1, 2, ... on all ranks alike, and entered and left in that order; at
    most DEPTH are entered and not left. `rank` and `size` are those of the node group.
    """

    def __init__(self, memory: NodeSharedMemory, rank: int, size: int) -> None:
        self._memory, self._rank, self._size = memory, rank, size
        block = memory.allocate(_HEAD_BYTES + DEPTH * INLINE_BYTES)
        self.entered = self.left = 0
        self._lock = threading.Lock()
        self._lock.acquire()
        location = memory.locate(block)
        self._shared = location is not None
        self._blocks = {rank: block}
        if location is not None:
            for local in set(range(size)) - {rank}:
                self._blocks[local] = memory.view(local, location, len(block), torch.uint8)
        self._peers = sorted(self._blocks.keys() - {rank})
        self._words = {
            local: block[:_HEAD_BYTES].view(torch.int64).numpy()
            for local, block in self._blocks.items()
        }

    def enter(self, tensor: Tensor, *, reachable: bool = True) -> None:
        """Enter the next collective with a flat tensor; a small one is copied to an inline slot.

        `reachable`: whether other processes may access the tensor or a copy. Not so on a device.
        """
        word = _LOCATIONS + 2 * (self.entered % DEPTH)
        location = self._memory.locate(tensor) if reachable else None
        may_copy = self._shared and reachable
        if may_copy and location is None and tensor.nbytes <= INLINE_BYTES:
            self.inline_slot(self.entered, tensor).copy_(tensor)
            location = SegmentOffset(_INLINE, 0)
        words = self._words[self._rank]
        words[word : word + 2] = location or (_UNREACHABLE, 0)
        self._memory_fence()
        self.entered += 1
        words[_ENTERED] = self.entered

    def all_entered(self, number: int) -> bool:
        """Return whether all ranks of the node have entered a collective. Once true, always."""
        return self._all_beyond(_ENTERED, number)

    def leave(self) -> None:
        """Leave the oldest collective that was entered and not left."""
        self._memory_fence()
        self.left += 1
        self._words[self._rank][_LEFT] = self.left

    def all_left(self, number: int) -> bool:
        """Return whether all ranks of the node have left a collective. Once true, always."""
        return self._all_beyond(_LEFT, number)

    def inline_slot(self, number: int, like: Tensor) -> Tensor:
        """Return this rank's slot in a collective, with the dtype and length of a tensor."""
        return self._slot_of(self._rank, number, like)

    def tensors(self, number: int, own: Tensor) -> list[Tensor] | None:
        """Return every rank's tensor, by local rank; None if one is out of reach.

        All ranks must have entered. Other ranks' tensors are views of their memory; this rank's is
        `own`, or the inline slot that holds its copy.
        """
        if self._size == 1:
            return [own]
        if not self._shared:
            return None
        word = _LOCATIONS + 2 * (number % DEPTH)
        tensors = []
        for local in range(self._size):
            segment, start = self._words[local][word : word + 2].tolist()
            if segment == _UNREACHABLE:
                return None
            if segment == _INLINE:
                tensors.append(self._slot_of(local, number, own))
            elif local == self._rank:
                tensors.append(own)
            else:
                location = SegmentOffset(segment, start)
                tensors.append(self._memory.view(local, location, own.numel(), own.dtype))
        return tensors

    def _slot_of(self, local: int, number: int, like: Tensor) -> Tensor:
        start = _HEAD_BYTES + number % DEPTH * INLINE_BYTES
        return self._blocks[local][start : start + like.nbytes].view(like.dtype)

    def _all_beyond(self, word: int, number: int) -> bool:
        if any(self._words[local][word] <= number for local in self._peers):
            return False
        self._memory_fence()
        return True

    def _memory_fence(self) -> None:
        """Order memory accesses: none passes this point, such as a flag its data.

        Releasing and acquiring a lock is a full barrier.
        """
        self._lock.release()
        self._lock.acquire()
