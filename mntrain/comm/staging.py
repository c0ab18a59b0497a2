"""Access to tensors for collectives: host tensors in place, device tensors through pinned slots.

A device tensor travels in chunks through slots of pinned host memory that the node's ranks share,
so that sums within the node are made there as for host tensors. Each chunk is a collective of its
own, and several are in flight:

    caller's stream        ... backward fills the bucket | event | continues with backward  | wait
    device to host                                        chunk 0 | chunk 1 | chunk 2 |
    node and wire                                                   chunk 0 | chunk 1 | chunk 2
    host to device                                                            chunk 0 | chunk 1 ..

Only the elements that a verb needs are copied: a reduce-scatter copies only this rank's shard back,
and an all-gather copies only that shard to the host.
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
from mntrain.comm.shared_memory import DEPTH, NodeSharedMemory
from zero.collectives import CompletedWork, Work
from zero.layout import split

SLOT_BYTES = 4 << 20  # large enough for a copy at full speed, small enough to overlap


class TensorAccess(Protocol):
    """A tensor as one collective accesses it, on the communication thread."""

    host: Tensor  # the memory that the collective works on, valid after `begin`
    reachable: bool  # whether the node's other ranks may access `host` if it is shared memory

    def begin(self) -> None:
        """Start to copy the content to `host`, in the order of the collectives. Does not wait."""

    def here(self) -> bool:
        """Return True when `host` holds the content."""

    def give_back(self) -> Work:
        """Start to copy the result back. The caller's thread waits for the returned work."""


class HostAccess:
    """Access to a host tensor in place."""

    reachable = True

    def __init__(self, tensor: Tensor) -> None:
        self.host = tensor

    def begin(self) -> None:
        """Do nothing."""

    def here(self) -> bool:
        """Return True."""
        return True

    def give_back(self) -> Work:
        """Return completed work."""
        return CompletedWork()


@dataclass(frozen=True)
class StagingChunk:
    """The elements of a tensor that go through one slot: runs, which lie there end to end."""

    runs: tuple[Span, ...]  # one for every shard, or one in all

    @property
    def bounds(self) -> tuple[int, ...]:
        """The limits of the runs in the slot."""
        return tuple(accumulate((high - low for low, high in self.runs), initial=0))

    def of(self, tensor: Tensor, which: Sequence[int] | None = None) -> list[Tensor]:
        """Return views of a flat tensor: all runs, or those of some shards."""
        runs = self.runs if which is None else [self.runs[index] for index in which]
        return [tensor[low:high] for low, high in runs]


def chunks(
    bounds: Sequence[int], itemsize: int, slot_bytes: int, *, whole: bool
) -> list[StagingChunk]:
    """Cut a tensor into as few chunks as fit into slots of `slot_bytes`. Pure.

    Each chunk has a part of every shard, in order; or one run if the verb has no shards (`whole`).
    """
    shards = [(bounds[0], bounds[-1])] if whole else list(pairwise(bounds))
    capacity = slot_bytes // itemsize - len(shards)  # parts of a shard differ by one element
    assert capacity > 0, (len(shards), slot_bytes)
    count = max(1, -(-bounds[-1] // capacity))
    cuts = [[low + mark for mark in split(high - low, count)] for low, high in shards]
    return [StagingChunk(tuple((cut[i], cut[i + 1]) for cut in cuts)) for i in range(count)]


class Staging:
    """The pinned slots of one rank, used in turn. Construction is collective over the node.

    There are as many slots as collectives may be in flight. Collectives begin and end in one order,
    so the oldest slot is free when the next chunk begins.
    """

    def __init__(
        self, memory: NodeSharedMemory, copier: DeviceCopy, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self.slot_bytes = slot_bytes
        self._copiers = (copier, HostCopy())
        self._memory = memory.allocate(DEPTH * slot_bytes)
        # By slot: the events after which it is free.
        self._free: list[list[DeviceEvent]] = [[] for _ in range(DEPTH)]
        self._count = 0
        # The memory must outlive its page lock.
        weakref.finalize(self, _unpin, copier.pin(self._memory), self._memory)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return len(self._memory)

    def mark(self, tensor: Tensor) -> tuple[DeviceCopy, DeviceEvent]:
        """Return the copies for a tensor, and the event after which its content is ready."""
        copier = next(copier for copier in self._copiers if copier.owns(tensor))
        return copier, copier.record_event()

    def slot(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """Return the next slot, as a tensor of `numel` elements, and its index."""
        index = self._count % DEPTH
        self._count += 1
        start = index * self.slot_bytes
        return self._memory[start : start + numel * dtype.itemsize].view(dtype), index

    def free_after(self, index: int) -> list[DeviceEvent]:
        """Return the events to wait for before a slot is filled again."""
        return self._free[index]

    def release(self, index: int, after: list[DeviceEvent]) -> None:
        """Free a slot after the events."""
        self._free[index] = after


def _unpin(unpin: Callable[[], object], memory: Tensor) -> None:
    unpin()
    del memory


class StagedAccess:
    """Access to one chunk of a tensor through a slot.

    `goes` and `comes` are the indices of the shards to copy to the slot and back; None: all.
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
        """Start to copy the chunk into the next slot."""
        numel = self._chunk.bounds[-1]
        self.host, self._slot = self._staging.slot(numel, self._tensor.dtype)
        after = [self._ready, *self._staging.free_after(self._slot)]
        self._fetched = [
            self._copier.copy_to_host(place, parts, after)
            for place, parts in self._pairs(self._goes)
        ] or after

    def here(self) -> bool:
        """Return True when the slot holds the chunk."""
        return all(event.query() for event in self._fetched)

    def give_back(self) -> Work:
        """Start to copy the result back, and free the slot after that."""
        events = [
            self._copier.copy_to_device(parts, place, ())
            for place, parts in self._pairs(self._comes)
        ]
        self._staging.release(self._slot, events)
        return StreamOrderedWork(events)

    def _pairs(self, which: Sequence[int] | None) -> list[tuple[Tensor, list[Tensor]]]:
        """Return parts of the slot, each with the parts of the tensor that lie there."""
        if which is None:
            return [(self.host, self._chunk.of(self._tensor))]
        bounds = self._chunk.bounds
        return [
            (self.host[bounds[i] : bounds[i + 1]], self._chunk.of(self._tensor, [i])) for i in which
        ]


class StreamOrderedWork:
    """Work whose result is ordered for the caller's stream, but may not be ready for the host."""

    def __init__(self, events: Sequence[DeviceEvent]) -> None:
        self._events = events

    def wait(self) -> None:
        """Make the caller's stream wait for the events."""
        for event in self._events:
            event.wait_on_stream()
