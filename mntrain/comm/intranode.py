"""Within the node: how the owner of a lane gets what the others have, and hands them what it made.

Two ways of one contract. In shared memory the owner reads and writes its peers' tensors, who have
nothing to do. Where a tensor lies outside of it, everything goes by messages.

Steps are generators: they yield what to ask before they go on, and so many of them take turns in
one thread.
"""

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mntrain.comm.algorithms.chunk_plan import HierarchyPlan, Span
from mntrain.comm.buffers import BufferPool, BufferView
from mntrain.comm.mpi import Communicator, Requests
from mntrain.comm.reduction import Adder, as_bytes

T = TypeVar("T")
Steps = Generator[Callable[[], bool], None, T]


@dataclass
class CommTools:
    """What all collectives of a world work with. One thread at a time uses it."""

    comm: Communicator
    scratch: BufferPool
    adder: Adder
    fence: Callable[[], Steps[None]]
    """What has been computed is in memory when these steps are over: MPI may send it."""


def no_fence() -> Steps[None]:
    """The fence of the host, which computes in order."""
    yield from ()


BLOCK_BYTES = 256 << 10  # what is added and handed out while it is in the cache


class IntranodeAccess(Protocol):
    """The tensors of a node's members in one collective, as the owner of a lane reaches them."""

    dtype: torch.dtype  # of all of them

    def data(self, part: Span) -> BufferView:
        """A part of this rank's tensor."""

    def sum(self, part: Span, to: Collection[int]) -> Steps[None]:
        """Leave the sum over the node in this rank's part, and in that of the members `to`."""

    def take(self, part: Span, source: int) -> Steps[None]:
        """Bring a part of a member's tensor to the same place of this rank's."""

    def give(self, part: Span, to: Collection[int]) -> Steps[None]:
        """Bring a part of this rank's tensor to the same place of other members'."""


class SharedMemoryAccess:
    """Members' tensors are views of their memory. Nothing to wait for: all have entered."""

    def __init__(self, tools: CommTools, scheme: HierarchyPlan, tensors: Sequence[Tensor]) -> None:
        self._adder, self._traffic = tools.adder, tools.comm.traffic
        self._tensors, self._local_rank = tensors, scheme.local_rank
        self.dtype = tensors[0].dtype
        self._bytes = as_bytes(tensors[scheme.local_rank])
        self._cuts: dict[Span, Sequence[Tensor]] = {}  # of all members' tensors

    def data(self, part: Span) -> BufferView:
        """See `IntranodeAccess.data`."""
        low, high = part
        size = self.dtype.itemsize
        return BufferView(self._cut(part)[self._local_rank], self._bytes[low * size : high * size])

    def sum(self, part: Span, to: Collection[int]) -> Steps[None]:
        """See `IntranodeAccess.sum`."""
        yield from ()
        if len(self._tensors) == 1:
            return
        addends = self._cut(part)
        if not to:
            self._add(addends, to)
        else:  # what is handed out is still in the cache
            block = BLOCK_BYTES // self.dtype.itemsize
            for several in zip(*(cut.split(block) for cut in addends), strict=True):
                self._add(several, to)
        self._count(part, len(self._tensors) - 1 + len(to))

    def take(self, part: Span, source: int) -> Steps[None]:
        """See `IntranodeAccess.take`."""
        yield from ()
        cuts = self._cut(part)
        cuts[self._local_rank].copy_(cuts[source])
        self._count(part, 1)

    def give(self, part: Span, to: Collection[int]) -> Steps[None]:
        """See `IntranodeAccess.give`."""
        yield from ()
        cuts = self._cut(part)
        for local in to:
            cuts[local].copy_(cuts[self._local_rank])
        self._count(part, len(to))

    def _add(self, addends: Sequence[Tensor], to: Collection[int]) -> None:
        total = addends[self._local_rank]
        self._adder.add(addends, total, self._local_rank)
        for local in to:
            addends[local].copy_(total)

    def _cut(self, part: Span) -> Sequence[Tensor]:
        """A part of every member's tensor."""
        cuts = self._cuts.get(part)
        if cuts is None:
            low, high = part
            cuts = self._cuts[part] = [tensor[low:high] for tensor in self._tensors]
        return cuts

    def _count(self, part: Span, times: int) -> None:
        self._traffic.bytes["node"] += times * (part[1] - part[0]) * self.dtype.itemsize


class MessageAccess:
    """Members send what the owner asks for, and take what it gives: see `pieces.Follower`."""

    def __init__(self, tools: CommTools, scheme: HierarchyPlan, tensor: Tensor, tag: int) -> None:
        self._comm, self._adder, self._scratch = tools.comm, tools.adder, tools.scratch
        self._fence = tools.fence
        self._tensor, self._tag, self.dtype = tensor, tag, tensor.dtype
        self._members, self._local_rank = scheme.members, scheme.local_rank

    def data(self, part: Span) -> BufferView:
        """See `IntranodeAccess.data`."""
        cut = self._tensor[slice(*part)]
        return BufferView(cut, as_bytes(cut))

    def sum(self, part: Span, to: Collection[int]) -> Steps[None]:
        """See `IntranodeAccess.sum`."""
        mine = self.data(part).tensor
        here = self._local_rank
        others = [member for local, member in enumerate(self._members) if local != here]
        with self._scratch.lend() as lent:
            theirs = [lent.data(len(mine), self.dtype) for _ in others]
            flights = [
                self._comm.receive(member, data.bytes, self._tag)
                for member, data in zip(others, theirs, strict=True)
            ]
            yield Requests.of(*flights).over
            addends = [data.tensor for data in theirs]
            addends.insert(here, mine)
            self._adder.add(addends, mine, here)
            yield from self._fence()
        yield from self.give(part, to)

    def take(self, part: Span, source: int) -> Steps[None]:
        """See `IntranodeAccess.take`."""
        yield self._comm.receive(self._members[source], self.data(part).bytes, self._tag).over

    def give(self, part: Span, to: Collection[int]) -> Steps[None]:
        """See `IntranodeAccess.give`."""
        data = self.data(part).bytes
        yield Requests.of(*(self._comm.send(self._members[i], data, self._tag) for i in to)).over
