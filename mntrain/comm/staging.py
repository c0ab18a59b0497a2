"""How a tensor's content gets into host memory, where MPI takes it, and comes back.

On the CPU a tensor lies there already. What lies on a device goes in chunks through slots of pinned
memory, which the node's ranks share: so sums within the node are made there as for any host
tensor. Every chunk is a collective of its own, and several are under way at a time:

    caller's stream        ... backward fills the bucket | mark |  goes on with backward    | wait
    device to host                                        chunk 0 | chunk 1 | chunk 2 |
    node and wire                                                   chunk 0 | chunk 1 | chunk 2
    host to device                                                            chunk 0 | chunk 1 ..

Only what a verb needs is copied: of a reduce-scatter only this rank's shard comes back, of an
all-gather only that goes.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from mntrain.comm.chunk_plan import Span
from mntrain.comm.device_copy import DeviceCopy, DeviceEvent, HostCopy
from mntrain.comm.shared_flags import DEPTH
from mntrain.comm.shared_memory import NodeSharedMemory
from zero.collectives import CompletedWork, Work
from zero.layout import split

SLOT_BYTES = 4 << 20  # large enough for a copy at full speed, small enough to overlap


class TensorAccess(Protocol):
    """A tensor on its way through a collective. Used on the communication thread."""

    host: Tensor  # the content where the collective works on it, once it is here
    reachable: bool  # whether the node's other ranks may read and write it, if they know where

    def begin(self) -> None:
        """Ask for the content, and do not wait. Loans begin in the order of their collectives."""

    def here(self) -> bool:
        """Whether the content is here."""

    def give_back(self) -> Work:
        """Bring the result back to the tensor.

        The work is waited for on the caller's thread.
        """


class HostAccess:
    """A tensor that lies in host memory: MPI works on it directly."""

    reachable = True

    def __init__(self, tensor: Tensor) -> None:
        self.host = tensor

    def begin(self) -> None:
        """See `TensorAccess.begin`."""

    def here(self) -> bool:
        """See `TensorAccess.here`."""
        return True

    def give_back(self) -> Work:
        """See `TensorAccess.give_back`."""
        return CompletedWork()


@dataclass(frozen=True)
class StagingChunk:
    """What of a tensor goes through one slot: runs of elements, which lie there end to end."""

    runs: tuple[Span, ...]  # one for every shard, or one in all

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the runs begin and end in the slot."""
        return tuple(accumulate((high - low for low, high in self.runs), initial=0))

    def of(self, tensor: Tensor, which: Sequence[int] | None = None) -> list[Tensor]:
        """Views of a flat tensor: the runs, or those of some shards."""
        runs = self.runs if which is None else [self.runs[index] for index in which]
        return [tensor[low:high] for low, high in runs]


def chunks(
    bounds: Sequence[int], itemsize: int, slot_bytes: int, *, whole: bool
) -> list[StagingChunk]:
    """A tensor's elements in as few chunks as fit into slots of so many bytes. Pure.

    Every chunk has a part of every shard, the first of them the beginnings; or, if the verb knows
    no shards (`whole`), one run.
    """
    shards = [(bounds[0], bounds[-1])] if whole else list(pairwise(bounds))
    room = slot_bytes // itemsize - len(shards)  # parts of a shard are equal to within an element
    assert room > 0, (len(shards), slot_bytes)
    count = max(1, -(-bounds[-1] // room))
    cuts = [[low + mark for mark in split(high - low, count)] for low, high in shards]
    return [StagingChunk(tuple((cut[i], cut[i + 1]) for cut in cuts)) for i in range(count)]


class Staging:
    """The slots of one rank, and the loans that go through them. Construction is node-collective.

    As many slots as collectives may be under way, which begin and end in one order: so the oldest
    slot is free when the next chunk comes.
    """

    def __init__(
        self, memory: NodeSharedMemory, copier: DeviceCopy, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self.slot_bytes = slot_bytes
        self._copiers = (copier, HostCopy())
        self._room = memory.allocate(DEPTH * slot_bytes)
        self._free: list[list[DeviceEvent]] = [[] for _ in range(DEPTH)]  # by slot, after what
        self._count = 0
        # The room stays until it is pinned no more.
        weakref.finalize(self, _undo, copier.pin(self._room), self._room)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return len(self._room)

    def mark(self, tensor: Tensor) -> tuple[DeviceCopy, DeviceEvent]:
        """Who copies a tensor, and what of the device's work is to come before."""
        copier = next(copier for copier in self._copiers if copier.owns(tensor))
        return copier, copier.record_event()

    def slot(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """The next slot, as a tensor of so many elements; and its number."""
        index = self._count % DEPTH
        self._count += 1
        start = index * self.slot_bytes
        return self._room[start : start + numel * dtype.itemsize].view(dtype), index

    def free_after(self, index: int) -> list[DeviceEvent]:
        """What is to be over before a slot is filled anew."""
        return self._free[index]

    def release(self, index: int, after: list[DeviceEvent]) -> None:
        """Give a slot back, free after these marks."""
        self._free[index] = after


def _undo(unpin: Callable[[], object], room: Tensor) -> None:
    unpin()
    del room


class StagedAccess:
    """A chunk of a tensor that goes through a slot.

    `goes` and `comes` are what of the chunk is copied there and back: shards by index, or all
    (None).
    """

    reachable = True

    def __init__(
        self,
        staging: Staging,
        tensor: Tensor,
        chunk: StagingChunk,
        *,
        ready: tuple[DeviceCopy, DeviceEvent],
        goes: Sequence[int] | None,
        comes: Sequence[int] | None,
    ) -> None:
        self._staging, self._tensor, self._chunk = staging, tensor, chunk
        self._copier, self._ready = ready
        self._goes, self._comes = goes, comes
        self._fetched: list[DeviceEvent] = []

    def begin(self) -> None:
        """See `TensorAccess.begin`."""
        numel = self._chunk.bounds[-1]
        self.host, self._slot = self._staging.slot(numel, self._tensor.dtype)
        after = [self._ready, *self._staging.free_after(self._slot)]
        self._fetched = [
            self._copier.copy_to_host(place, parts, after)
            for place, parts in self._pairs(self._goes)
        ] or after

    def here(self) -> bool:
        """See `TensorAccess.here`."""
        return all(event.query() for event in self._fetched)

    def give_back(self) -> Work:
        """See `TensorAccess.give_back`."""
        marks = [
            self._copier.copy_to_device(parts, place, ())
            for place, parts in self._pairs(self._comes)
        ]
        self._staging.release(self._slot, marks)
        return StreamOrderedWork(marks)

    def _pairs(self, which: Sequence[int] | None) -> list[tuple[Tensor, list[Tensor]]]:
        """Places in the slot, and what of the tensor lies there."""
        if which is None:
            return [(self.host, self._chunk.of(self._tensor))]
        bounds = self._chunk.bounds
        return [
            (self.host[bounds[i] : bounds[i + 1]], self._chunk.of(self._tensor, [i])) for i in which
        ]


class StreamOrderedWork:
    """Work whose result is ready for the caller's stream, though perhaps not yet for the host."""

    def __init__(self, marks: Sequence[DeviceEvent]) -> None:
        self._marks = marks

    def wait(self) -> None:
        """See `Work.wait`."""
        for event in self._marks:
            event.wait_on_stream()
