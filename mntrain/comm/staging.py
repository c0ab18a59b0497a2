"""Access to tensors for collectives: host tensors in place, device tensors staged or by MPI itself.

A staged tensor travels in chunks through slots of pinned host memory that the node's ranks share,
so that sums within the node are made there as for host tensors. Each chunk is a collective of its
own, and several are in flight:

    caller's stream        ... backward fills the bucket | event | continues with backward  | wait
    device to host                                        chunk 0 | chunk 1 | chunk 2 |
    node and wire                                                   chunk 0 | chunk 1 | chunk 2
    host to device                                                            chunk 0 | chunk 1 ..

Only the elements that a verb needs are copied: a reduce-scatter copies only this rank's shard back,
and an all-gather copies only that shard to the host.

A CUDA-aware MPI reads and writes device memory. The steps are those of host tensors, and all
messages are point to point: non-blocking collectives of device memory crash in Open MPI. Sums are
made on the device, in fp32 or wider, on a side stream. The host does not wait for the device: where
MPI is to read a computed result, or to overwrite memory that a kernel reads, a step polls an event.
"""

import weakref
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mntrain.comm.chunk_plan import Span
from mntrain.comm.device_copy import DeviceCopy, StreamOrderedWork
from mntrain.comm.pending import Steps
from mntrain.comm.shared_memory import DEPTH, NodeSharedMemory
from zero.collectives import CompletedWork, Work
from zero.layout import split

SLOT_BYTES = 4 << 20  # large enough for a copy at full speed, small enough to overlap


class TensorAccess:
    """A tensor as one collective accesses it, on the communication thread: a host tensor, in place.

    `host` is the memory that the collective works on, valid after `begin`.
    """

    reachable = True  # whether the node's other ranks may access `host` if it is shared memory

    def __init__(self, tensor: Tensor) -> None:
        self.host = tensor

    def begin(self) -> None:
        """Start to copy the content to `host`, in the order of the collectives. Does not wait."""

    def here(self) -> bool:
        """Return True when `host` holds the content."""
        return True

    def give_back(self) -> Work:
        """Start to copy the result back. The caller's thread waits for the returned work."""
        return CompletedWork()


class DeviceAccess(TensorAccess):
    """Access to a device tensor that MPI uses in place, after the event `ready`."""

    reachable = False

    def __init__(self, tensor: Tensor, copier: DeviceCopy, ready: torch.cuda.Event) -> None:
        super().__init__(tensor)
        self._copier, self._ready = copier, ready

    def here(self) -> bool:
        """Return True when the caller's work on the tensor is done."""
        return bool(self._ready.query())

    def give_back(self) -> Work:
        """Return work that ends with the side stream's work so far."""
        with self._copier.side_stream():
            end = self._copier.record_event()
        return StreamOrderedWork(self._copier, lambda: end)


def fence(copier: DeviceCopy) -> Steps[None]:
    """Wait until the work given to the device's current stream so far is done."""
    yield copier.record_event().query


def run_on_side_stream(copier: DeviceCopy, steps: Steps[None]) -> Steps[None]:
    """Run each of the steps with the device's side stream as the current one."""
    while True:
        with copier.side_stream():
            condition = next(steps, None)
        if condition is None:
            return
        yield condition


def chunks(
    bounds: Sequence[int], itemsize: int, slot_bytes: int, *, whole: bool
) -> list[tuple[Span, ...]]:
    """Cut a tensor into as few chunks as fit into slots of `slot_bytes`. Pure.

    A chunk consists of spans of the tensor, which lie end to end in a slot: a part of every shard,
    in order, or one span if the verb has no shards (`whole`).
    """
    shards = [(bounds[0], bounds[-1])] if whole else list(pairwise(bounds))
    capacity = slot_bytes // itemsize - len(shards)  # parts of a shard differ by one element
    assert capacity > 0, (len(shards), slot_bytes)
    count = max(1, -(-bounds[-1] // capacity))
    cuts = [list(pairwise(low + mark for mark in split(high - low, count))) for low, high in shards]
    return list(zip(*cuts, strict=True))


class Staging:
    """The pinned slots of one rank, used in turn. Construction is collective over the node.

    There are as many slots as collectives may be in flight. Collectives begin and end in one order,
    so the oldest slot is free when the next chunk begins.
    """

    def __init__(
        self, memory: NodeSharedMemory, copier: DeviceCopy, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self.copier, self.slot_bytes = copier, slot_bytes
        self._memory = memory.allocate(DEPTH * slot_bytes)
        # By slot: the events after which it is free.
        self.free_after: list[list[torch.cuda.Event]] = [[] for _ in range(DEPTH)]
        self._count = 0
        weakref.finalize(self, copier.pin(self._memory))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return len(self._memory)

    def next_slot(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """Return the next slot, as a tensor of `numel` elements, and its index."""
        index = self._count % DEPTH
        self._count += 1
        start = index * self.slot_bytes
        return self._memory[start : start + numel * dtype.itemsize].view(dtype), index


class StagedAccess(TensorAccess):
    """Access to a chunk of a device tensor through a slot, after the event `ready`.

    `goes` and `comes` are the indices of the spans to copy to the slot and back; None: all.
    `bounds` are the limits of the spans in the slot.
    """

    def __init__(
        self,
        staging: Staging,
        tensor: Tensor,
        spans: Sequence[Span],
        *,
        ready: torch.cuda.Event,
        goes: Sequence[int] | None,
        comes: Sequence[int] | None,
    ) -> None:
        self._staging, self._tensor, self._spans = staging, tensor, spans
        self._ready, self._goes, self._comes = ready, goes, comes
        self.bounds = tuple(accumulate((high - low for low, high in spans), initial=0))

    def begin(self) -> None:
        """Start to copy the chunk into the next slot."""
        staging = self._staging
        self.host, self._slot = staging.next_slot(self.bounds[-1], self._tensor.dtype)
        self._fetched = staging.copier.copy_to_host(
            self._views(self._goes), self._ready, *staging.free_after[self._slot]
        )

    def here(self) -> bool:
        """Return True when the slot holds the chunk."""
        return bool(self._fetched.query())

    def give_back(self) -> Work:
        """Start to copy the result back, and free the slot after that."""
        copier = self._staging.copier
        views = self._views(self._comes)
        end = copier.copy_to_device([(target, source) for source, target in views])
        self._staging.free_after[self._slot] = [end]
        return StreamOrderedWork(copier, lambda: end)

    def _views(self, which: Sequence[int] | None) -> list[tuple[Tensor, Tensor]]:
        """Return views of the slot and of the tensor, by span."""
        tensor, spans, bounds = self._tensor, self._spans, self.bounds
        indices = range(len(spans)) if which is None else which
        return [(self.host[bounds[i] : bounds[i + 1]], tensor[slice(*spans[i])]) for i in indices]
