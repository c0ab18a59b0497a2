"""The verbs of one level, by messages between the members of one group.

Sums are made here, not by MPI: MPI has no dependable sum for 16-bit floats, and bytes travel on
every MPI. Each member gathers what the others have of its own part and adds it in the order of
members 0, 1, 2, ..., its own in its turn, in fp32 or wider. So the bits of a sum do not depend on
who owns the element, and each level rounds a 16-bit sum once.
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

# A part travels in pieces: while one is added, the next ones are in flight. Of shorter pieces, as
# many as are that long together.
PIECE_BYTES = 1 << 20
PIECES_IN_FLIGHT = 4
# So many pieces of one member are added before the next member's: with one piece of each in turn,
# four ranks on two cores waited more, and a sum took a fifth longer.
PIECES_IN_A_ROW = 4


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
        itemsize = tensor.element_size()
        sends = [  # all before the first is waited for: nobody waits in a circle
            self._comm.send(peer, as_bytes(tensor[low:high]))
            for peer in _others(rank, size)
            for low, high in _pieces(parts[peer], itemsize)
        ]
        if size > 1:
            mine = _pieces(parts[rank], itemsize)
            rows = [mine[i : i + PIECES_IN_A_ROW] for i in range(0, len(mine), PIECES_IN_A_ROW)]
            arrivals = self._arrivals(tensor.dtype, rows)
            for row in rows:
                self._add([tensor[low:high] for low, high in row], arrivals)
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

    def _add(self, row: Sequence[Tensor], arrivals: Iterator[Tensor]) -> None:
        """Add what arrives to a row of this member's own pieces, each member in its turn."""
        wide = sum_dtype(row[0].dtype)
        totals: list[Tensor] = []
        for member in range(self._comm.size):
            for place, mine in enumerate(row):
                theirs = mine if member == self._comm.rank else next(arrivals)
                if member == 0:
                    totals.append(theirs.to(wide))  # the same memory where it is wide enough
                elif member <= self._comm.rank and theirs.dtype == wide:
                    # The other way round: the total reaches this member's own without a copy.
                    totals[place] = theirs.add_(totals[place])
                else:
                    totals[place] += theirs
        for mine, total in zip(row, totals, strict=True):
            mine.copy_(total)

    def _arrivals(self, dtype: torch.dtype, rows: Sequence[Sequence[Part]]) -> Iterator[Tensor]:
        """What the others have of this member's pieces: row by row, in each the members in order.

        What is yielded lies in scratch memory. The first member may use it until the next is asked
        for; others, who carry totals from member to member, for a row's length longer.
        """
        messages = [
            (peer, high - low)
            for row in rows
            for peer in range(self._comm.size)
            if peer != self._comm.rank
            for low, high in row
        ]
        longest = max(numel for _, numel in messages)
        in_flight = PIECES_IN_FLIGHT * PIECE_BYTES // (longest * dtype.itemsize)
        in_flight = min(in_flight, len(messages))
        kept = len(rows[0]) if self._comm.rank > 0 else 0
        buffers = self._buffers(dtype, longest, in_flight + kept)
        flights: list[Flight] = []
        for index in range(len(messages) + in_flight):
            done = index - in_flight
            if done >= 0:
                flights[done].wait()
                yield buffers[done % len(buffers)][: messages[done][1]]
            if index < len(messages):
                peer, numel = messages[index]
                buffer = buffers[index % len(buffers)][:numel]
                flights.append(self._comm.receive(peer, as_bytes(buffer)))

    def _buffers(self, dtype: torch.dtype, numel: int, count: int) -> list[Tensor]:
        """Scratch memory for so many messages; kept from call to call, grown when needed."""
        length = numel * dtype.itemsize
        if self._scratch.numel() < count * length:
            self._scratch = torch.empty(count * length, dtype=torch.uint8)
        return [self._scratch[i * length : (i + 1) * length].view(dtype) for i in range(count)]


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
