"""Within the node: how the owner of a lane gets what the others have, and hands them what it made.

Two ways of one contract. In shared memory the owner reads and writes its peers' tensors, who have
nothing to do. Where a tensor lies outside of it, everything goes by messages.

Steps are generators: they yield what to ask before they go on, and so many of them take turns in
one thread.
"""

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from mntrain.collectives.plan import Part, Scheme
from mntrain.collectives.scratch import Scratch
from mntrain.collectives.sums import Sums, as_bytes
from mntrain.mpi import Communicator, Flight

T = TypeVar("T")
Steps = Generator[Callable[[], bool], None, T]


@dataclass
class Tools:
    """What all collectives of a world work with. One thread at a time uses it."""

    comm: Communicator
    scratch: Scratch
    adder: Sums
    fence: Callable[[], Steps[None]]
    """What has been computed is in memory when these steps are over: MPI may send it."""


def at_once() -> Steps[None]:
    """The fence of the host, which computes in order."""
    yield from ()


BLOCK_BYTES = 256 << 10  # what is added and handed out while it is in the cache


class Near(Protocol):
    """The tensors of a node's members in one collective, as the owner of a lane reaches them."""

    def sum(self, part: Part, to: Collection[int]) -> Steps[None]:
        """Leave the sum over the node in this rank's part, and in that of the members `to`."""

    def take(self, part: Part, source: int) -> Steps[None]:
        """Bring a part of a member's tensor to the same place of this rank's."""

    def give(self, part: Part, to: Collection[int]) -> Steps[None]:
        """Bring a part of this rank's tensor to the same place of other members'."""


class SharedNear:
    """Members' tensors are views of their memory. Nothing to wait for: all have entered."""

    def __init__(self, tools: Tools, scheme: Scheme, tensors: Sequence[Tensor]) -> None:
        self._adder, self._traffic = tools.adder, tools.comm.traffic
        self._tensors, self._local_rank = tensors, scheme.local_rank
        self._itemsize = tensors[0].element_size()

    def sum(self, part: Part, to: Collection[int]) -> Steps[None]:
        """See `Near.sum`."""
        yield from ()
        if len(self._tensors) == 1:
            return
        start, stop = part
        for low in range(start, stop, BLOCK_BYTES // self._itemsize):
            high = min(low + BLOCK_BYTES // self._itemsize, stop)
            addends = [tensor[low:high] for tensor in self._tensors]
            total = addends[self._local_rank]
            self._adder.add(addends, total, self._local_rank)
            for local in to:
                addends[local].copy_(total)
        self._count(part, len(self._tensors) - 1 + len(to))

    def take(self, part: Part, source: int) -> Steps[None]:
        """See `Near.take`."""
        yield from ()
        low, high = part
        self._tensors[self._local_rank][low:high].copy_(self._tensors[source][low:high])
        self._count(part, 1)

    def give(self, part: Part, to: Collection[int]) -> Steps[None]:
        """See `Near.give`."""
        yield from ()
        low, high = part
        mine = self._tensors[self._local_rank][low:high]
        for local in to:
            self._tensors[local][low:high].copy_(mine)
        self._count(part, len(to))

    def _count(self, part: Part, times: int) -> None:
        self._traffic.bytes["node"] += times * (part[1] - part[0]) * self._itemsize


class MessagedNear:
    """Members send what the owner asks for, and take what it gives: see `pieces.Follower`."""

    def __init__(self, tools: Tools, scheme: Scheme, tensor: Tensor, tag: int) -> None:
        self._comm, self._adder, self._scratch = tools.comm, tools.adder, tools.scratch
        self._fence = tools.fence
        self._tensor, self._tag = tensor, tag
        self._members, self._local_rank = scheme.members, scheme.local_rank

    def sum(self, part: Part, to: Collection[int]) -> Steps[None]:
        """See `Near.sum`."""
        low, high = part
        mine = self._tensor[low:high]
        with ExitStack() as stack:
            addends = [
                mine
                if local == self._local_rank
                else stack.enter_context(self._scratch.lend(high - low, mine.dtype))
                for local in range(len(self._members))
            ]
            flights = [
                self._comm.receive(member, as_bytes(addends[local]), self._tag)
                for local, member in enumerate(self._members)
                if local != self._local_rank
            ]
            yield Flight.of(*flights).over
            self._adder.add(addends, mine, self._local_rank)
            yield from self._fence()
        yield from self.give(part, to)

    def take(self, part: Part, source: int) -> Steps[None]:
        """See `Near.take`."""
        room = as_bytes(self._tensor[slice(*part)])
        yield self._comm.receive(self._members[source], room, self._tag).over

    def give(self, part: Part, to: Collection[int]) -> Steps[None]:
        """See `Near.give`."""
        data = as_bytes(self._tensor[slice(*part)])
        yield Flight.of(*(self._comm.send(self._members[i], data, self._tag) for i in to)).over
