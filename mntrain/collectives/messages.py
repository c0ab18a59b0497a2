"""The verbs of one level, by messages between the members of one group.

Sums are made here, not by MPI: MPI has no dependable sum for 16-bit floats, and bytes travel on
every MPI. Each member gathers what the others have of its own part and adds it in a fixed order, in
fp32 or wider, so each level rounds a 16-bit sum once.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mntrain.mpi import Communicator, Flight
from zero.layout import split

Part = tuple[int, int]  # elements from, to
Move = tuple[int, int, Part]  # from member, to member, elements

# A part travels in pieces: while one is added, the next ones are in flight.
PIECE_BYTES = 1 << 20
PIECES_IN_FLIGHT = 4


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The memory of a flat host tensor, as bytes. A view: no copy."""
    assert tensor.dim() == 1
    assert tensor.is_contiguous()
    array: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return array


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums accumulate: fp32, or wider where the tensor is; integers as int64."""
    wide = torch.float32 if dtype.is_floating_point else torch.int64
    return torch.promote_types(dtype, wide)


class Group:
    """Verbs over the members of one communicator, blocking and in place on flat host tensors.

    `parts[member]` is the run of elements that a member owns; parts may be empty and need not cover
    the tensor, and are the same on every member. With n members and S bytes in all parts, P in this
    member's own:

        verb             messages sent (of one piece or part)   bytes sent
        reduce_scatter   a part's pieces to each other member   S - P
        all_gather       n - 1, none when P is 0                (n - 1) P
        broadcast        root n - 1, others n - 2               root S, others S (n - 2) / (n - 1)
        move             one a move                             the moves' own
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def reduce_scatter(self, tensor: Tensor, parts: Sequence[Part]) -> None:
        """Leave the sum over members in this member's part; other elements keep what they had."""
        rank, size = self._comm.rank, self._comm.size
        sends = [
            self._comm.send(peer, as_bytes(tensor[low:high]))
            for peer in _others(rank, size)
            for low, high in _pieces(parts[peer], tensor.element_size())
        ]
        mine = tensor[slice(*parts[rank])]
        if size > 1 and len(mine):
            total = mine.to(sum_dtype(tensor.dtype))  # the part itself where it is wide enough
            for theirs, low, high in self._arrivals(tensor, parts[rank]):
                total[low - parts[rank][0] : high - parts[rank][0]] += theirs
            mine.copy_(total)
        for flight in sends:
            flight.wait()

    def all_gather(self, tensor: Tensor, parts: Sequence[Part]) -> None:
        """Hand every member's part to every member."""
        self._swap(tensor, parts, _others(self._comm.rank, self._comm.size))

    def all_reduce(self, tensor: Tensor) -> None:
        """Leave the sum over members in every member's tensor, the same bits in each."""
        parts = equal_parts(len(tensor), self._comm.size)
        self.reduce_scatter(tensor, parts)
        self.all_gather(tensor, parts)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Hand root's tensor to all: a scatter over the others, who hand the parts to each other.

        Source: van de Geijn, "On global combine operations", JPDC 22 (1994).
        """
        others = [member for member in range(self._comm.size) if member != root]
        if not others:
            return
        parts = equal_parts(len(tensor), len(others))
        parts.insert(root, (0, 0))
        self.move(tensor, [(root, member, parts[member]) for member in others])
        if self._comm.rank != root:
            peers = _others(self._comm.rank, self._comm.size)
            self._swap(tensor, parts, [peer for peer in peers if peer != root])

    def move(self, tensor: Tensor, moves: Sequence[Move]) -> None:
        """Copy runs of elements from one member's tensor to the same place in another's."""
        rank = self._comm.rank
        self._comm.exchange(
            [(to, as_bytes(tensor[slice(*p)])) for source, to, p in moves if source == rank != to],
            [
                (source, as_bytes(tensor[slice(*p)]))
                for source, to, p in moves
                if to == rank != source
            ],
        )

    def _swap(self, tensor: Tensor, parts: Sequence[Part], peers: Sequence[int]) -> None:
        """Hand this member's part to the peers, and take theirs."""
        views = [as_bytes(tensor[low:high]) for low, high in parts]
        self._comm.exchange(
            [(peer, views[self._comm.rank]) for peer in peers],
            [(peer, views[peer]) for peer in reversed(peers)],
        )

    def _arrivals(self, tensor: Tensor, part: Part) -> Iterator[tuple[Tensor, int, int]]:
        """Each other member's pieces of this member's part, in a fixed order.

        What is yielded is valid until the next is asked for: it lies in scratch memory.
        """
        pieces = [
            (peer, low, high)
            for peer in reversed(_others(self._comm.rank, self._comm.size))
            for low, high in _pieces(part, tensor.element_size())
        ]
        buffers = self._buffers(tensor.dtype, max(high - low for _, low, high in pieces))
        flights: list[Flight] = []
        for index in range(len(pieces) + PIECES_IN_FLIGHT):
            done = index - PIECES_IN_FLIGHT
            if done >= 0:
                _, low, high = pieces[done]
                flights[done].wait()
                yield buffers[done % len(buffers)][: high - low], low, high
            if index < len(pieces):
                peer, low, high = pieces[index]
                buffer = buffers[index % len(buffers)][: high - low]
                flights.append(self._comm.receive(peer, as_bytes(buffer)))

    def _buffers(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """Scratch memory for the pieces in flight; kept from call to call, grown when needed."""
        length = numel * dtype.itemsize
        if self._scratch.numel() < PIECES_IN_FLIGHT * length:
            self._scratch = torch.empty(PIECES_IN_FLIGHT * length, dtype=torch.uint8)
        return [
            self._scratch[i * length : (i + 1) * length].view(dtype)
            for i in range(PIECES_IN_FLIGHT)
        ]


def _others(rank: int, size: int) -> list[int]:
    """The other members, the next one first: so at every moment each is sent to by one."""
    return [(rank + step) % size for step in range(1, size)]


def _pieces(part: Part, itemsize: int) -> list[Part]:
    start, stop = part
    step = PIECE_BYTES // itemsize
    return [(low, min(low + step, stop)) for low in range(start, stop, step)]


def equal_parts(numel: int, size: int) -> list[Part]:
    """Parts of numel elements for so many members, equal to within one element."""
    return list(pairwise(split(numel, size)))
