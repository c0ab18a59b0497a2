"""Tensors of a GPU in collectives: staged in pinned host memory, or used by MPI itself.

A staged tensor travels in chunks through buffers of pinned host memory that the node's ranks
share, so that sums within the node are made there as for host tensors. Each chunk is a collective
of its own, and several are in flight:

    caller's stream        ... backward fills the bucket | event | continues with backward  | wait
    device to host                                        chunk 0 | chunk 1 | chunk 2 |
    node and wire                                                   chunk 0 | chunk 1 | chunk 2
    host to device                                                            chunk 0 | chunk 1 ..

Only the elements that a verb needs are copied: a reduce-scatter copies only this rank's shard back,
and an all-gather copies only that shard to the host.

A CUDA-aware MPI reads and writes device memory. The steps are those of host tensors, and all
messages are point to point: non-blocking collectives of device memory crash in Open MPI. Sums are
made on the device, in fp32 or wider, on a side stream. The host does not wait for the device: where
MPI is to read a computed result, or to overwrite memory that a kernel reads, a step polls an event,
a point in the work of the device.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mntrain.comm.chunk_plan import Span
from mntrain.comm.engine import Steps
from mntrain.comm.resources import TensorAccess
from mntrain.comm.shared_memory import DEPTH, NodeSharedMemory
from zero.collectives import Work
from zero.kernels import Add
from zero.layout import split

BUFFER_BYTES = 4 << 20  # large enough for a copy at full speed, small enough to overlap
Copies = Iterable[tuple[Tensor, Tensor]]  # (target, source)


class DeviceCopy:
    """Asynchronous copies and sums of a GPU: a stream for each direction, and one to compute.

    caller's stream    backward | e0            | ...
    copy to host                  wait e0, copy | e1
    side stream                                   wait e1, add | e2
    copy to device                                               wait e2, copy

    One thread at a time uses it. `add` makes the sums, and `buffer_bytes` is the length of a buffer
    in host memory. `warning` is the reason why copies are slower than they could be,
    and `pinned_bytes` is the host memory that is page-locked for them.
    """

    def __init__(self, device: torch.device, add: Add) -> None:
        self.device, self.add, self.buffer_bytes = device, add, BUFFER_BYTES
        self.warning, self.pinned_bytes = "", 0
        self._to_host, self._to_device, self._side = (torch.cuda.Stream(device) for _ in range(3))

    def owns(self, tensor: Tensor) -> bool:
        """Return True if a tensor lies on the device."""
        return tensor.device == self.device

    def record_event(self) -> torch.cuda.Event:
        """Return the point that the caller's current stream reaches next."""
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def record_time(self) -> torch.cuda.Event:
        """Return the point that the caller's current stream reaches next, with its time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait_on_stream(self, event: torch.cuda.Event) -> None:
        """Make later work on the caller's current stream wait; the host does not wait."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def side_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the stream for computation is the current one."""
        return torch.cuda.stream(self._side)

    def record_stream(self, tensor: Tensor) -> None:
        """Keep the tensor's memory from reuse until the current stream has finished with it."""
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def pin(self, memory: Tensor) -> Callable[[], object]:
        """Page-lock host memory, as the function `pin` does, and return what unlocks it.

        If the driver refuses, copies still work, but are slower, and `warning` says so.
        """
        unpin, self.warning = pin(memory, self.device)
        nbytes = 0 if self.warning else memory.nbytes
        self.pinned_bytes += nbytes

        def unpin_when_idle() -> None:
            self._to_host.synchronize()
            self._to_device.synchronize()
            unpin()
            self.pinned_bytes -= nbytes

        return unpin_when_idle

    def copy_to_host(self, copies: Copies, *after: torch.cuda.Event) -> torch.cuda.Event:
        """Start to copy tensors of the device to the host, after events; return the end."""
        return self._copy(self._to_host, copies, after)

    def copy_to_device(self, copies: Copies) -> torch.cuda.Event:
        """Start to copy host memory to tensors of the device; return the end."""
        return self._copy(self._to_device, copies, ())

    def fence(self) -> Steps[None]:
        """Wait until the work given to the device's current stream so far is done."""
        yield self.record_event().query

    def run_on_side_stream(self, steps: Steps[None]) -> Steps[None]:
        """Run each of the steps with the device's side stream as the current one."""
        while True:
            with self.side_stream():
                condition = next(steps, None)
            if condition is None:
                return
            yield condition

    def _copy(
        self, stream: torch.cuda.Stream, copies: Copies, after: Iterable[torch.cuda.Event]
    ) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            for event in after:
                stream.wait_event(event)
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                on_device = target if target.is_cuda else source
                on_device.record_stream(stream)
            return self.record_event()


def pin(memory: Tensor, device: torch.device) -> tuple[Callable[[], object], str]:
    """Page-lock host memory in place, for a GPU. Local.

    Return the function that unlocks it and keeps the memory alive until then, and the reason if
    the driver refuses. torch's own pinned memory is not used: it comes in powers of two and is
    never given back.
    """
    runtime: Any = torch.cuda.cudart()
    nbytes = memory.numel() * memory.element_size()
    with torch.cuda.device(device):
        refused = int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if not refused:
            return lambda: runtime.cudaHostUnregister(memory.data_ptr()), ""
        with suppress(RuntimeError):  # clear the error, which the next launch would report
            torch.ones(1, device=device)
    return lambda: None, f"the driver does not pin {nbytes} bytes of host memory (error {refused})"


class StreamOrderedWork:
    """Work whose result is ordered for the caller's stream, but may not be ready for the host.

    `end` returns the events of its end, and waits for the works `before`. Each `wait` calls it, in
    the context that `waiting` returns.
    """

    def __init__(
        self,
        copier: DeviceCopy,
        waiting: Callable[[], AbstractContextManager[object]],
        end: Callable[[], Sequence[torch.cuda.Event]],
        before: Sequence[Work] = (),
    ) -> None:
        self._copier, self._waiting, self._end, self.before = copier, waiting, end, before

    def done(self) -> bool:
        """Return whether the device has come to the end. Local."""
        before = [work.done() for work in self.before]  # each progresses then
        return all(before) and all(event.query() for event in self._end())

    def wait(self) -> None:
        """Make the caller's stream wait for the end."""
        with self._waiting():
            for event in self._end():
                self._copier.wait_on_stream(event)


class DeviceAccess(TensorAccess):
    """Access to a device tensor that MPI uses in place, after the event `ready`."""

    reachable = False

    def __init__(
        self, tensor: Tensor, bounds: tuple[int, ...], copier: DeviceCopy, ready: torch.cuda.Event
    ) -> None:
        super().__init__(tensor, bounds)
        self._copier, self._ready = copier, ready

    def here(self) -> bool:
        """Return True when the caller's work on the tensor is done."""
        return bool(self._ready.query())

    def give_back(self) -> torch.cuda.Event:
        """Return the end of the side stream's work so far."""
        with self._copier.side_stream():
            return self._copier.record_event()


def chunks(
    bounds: Sequence[int], itemsize: int, buffer_bytes: int, *, whole: bool
) -> list[tuple[Span, ...]]:
    """Cut a tensor into as few chunks as fit into buffers of `buffer_bytes`. Pure.

    A chunk consists of spans of the tensor, which lie end to end in a buffer: a part of every
    shard, in order, or one span if the verb has no shards (`whole`).
    """
    shards = [(bounds[0], bounds[-1])] if whole else list(pairwise(bounds))
    capacity = buffer_bytes // itemsize - len(shards)  # parts of a shard differ by one element
    assert capacity > 0, (len(shards), buffer_bytes)
    count = max(1, -(-bounds[-1] // capacity))
    cuts = [list(pairwise(low + mark for mark in split(high - low, count))) for low, high in shards]
    return list(zip(*cuts, strict=True))


class Staging:
    """The pinned buffers of one rank, used in turn. Construction is collective over the node.

    There are as many buffers as collectives may be in flight. Collectives begin and end in one
    order, so the oldest buffer is free when the next chunk begins.
    """

    def __init__(self, memory: NodeSharedMemory, copier: DeviceCopy) -> None:
        self.copier = copier
        self._memory = memory.allocate(DEPTH * copier.buffer_bytes)
        # By buffer: the events after which it is free.
        self.free_after: list[list[torch.cuda.Event]] = [[] for _ in range(DEPTH)]
        self._count = 0
        weakref.finalize(self, copier.pin(self._memory))

    def next_buffer(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """Return the next buffer, as a tensor of `numel` elements, and its index."""
        index = self._count % DEPTH
        self._count += 1
        start = index * self.copier.buffer_bytes
        return self._memory[start : start + numel * dtype.itemsize].view(dtype), index


class StagedAccess(TensorAccess):
    """Access to a chunk of a device tensor through a buffer, after the event `ready`.

    `goes` and `comes` are the indices of the spans to copy to the buffer and back; None: all.
    `bounds` are the limits of the spans in the buffer.
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
        """Start to copy the chunk into the next buffer."""
        staging = self._staging
        self.host, self._buffer = staging.next_buffer(self.bounds[-1], self._tensor.dtype)
        self._fetched = staging.copier.copy_to_host(
            self._views(self._goes), self._ready, *staging.free_after[self._buffer]
        )

    def here(self) -> bool:
        """Return True when the buffer holds the chunk."""
        return bool(self._fetched.query())

    def give_back(self) -> torch.cuda.Event:
        """Start to copy the result back, free the buffer after that, and return the end."""
        copier = self._staging.copier
        views = self._views(self._comes)
        end = copier.copy_to_device([(target, source) for source, target in views])
        self._staging.free_after[self._buffer] = [end]
        return end

    def _views(self, which: Sequence[int] | None) -> list[tuple[Tensor, Tensor]]:
        """Return views of the buffer and of the tensor, by span."""
        tensor, spans, bounds = self._tensor, self._spans, self.bounds
        indices = range(len(spans)) if which is None else which
        return [(self.host[bounds[i] : bounds[i + 1]], tensor[slice(*spans[i])]) for i in indices]
