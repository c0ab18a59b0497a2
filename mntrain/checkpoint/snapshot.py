"""Snapshots of the tensors to save, so that training may change them during the write.

On a GPU the copy is asynchronous, and only its consumers wait for it:

    training stream   ... step | E1 | forward, backward        | wait E2, step ...
    side stream             wait E1 | copy to pinned memory | E2 |
    writing thread                                       waits E2 | writes
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mntrain.comm.device_copy import pin

_ALIGNMENT = 64


class TensorRange(NamedTuple):
    """Elements of a tensor in a file: flat, the first of them being element `low`."""

    file: str
    name: str
    flat: Tensor
    low: int


class Snapshot(NamedTuple):
    """Copies of ranges, which may still be in progress."""

    ranges: Iterable[TensorRange]  # iterate once; waits for the copies
    events: Sequence[torch.cuda.Event]  # the end of the copies, by device; empty on the CPU

    def before_changes(self) -> None:
        """Make the current streams wait for the copies, before the originals are changed."""
        for event in self.events:
            event.wait()


class SnapshotBuffer:
    """Host memory for snapshots, reused because fresh pages would cost more than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def reserve(self, nbytes: int, *, pinned_for: torch.device | None) -> None:
        """Allocate and touch this much memory, pinned for copies from a GPU if one is given."""
        if self._unpin is not None:
            self._unpin()
        self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._memory.zero_()
        if pinned_for is not None and nbytes:
            unpin, _ = pin(self._memory, pinned_for)  # unpinned copies are slower, but correct
            self._unpin = weakref.finalize(self, _unpin_and_free, unpin, self._memory)

    def copy(
        self,
        ranges: Sequence[TensorRange],
        in_order: Callable[[TensorRange], bool] = lambda item: False,
    ) -> Snapshot:
        """Copy ranges into this memory, over the last snapshot.

        Copies from host memory are complete on return. Copies from a GPU are enqueued on a side
        stream, except for the ranges that `in_order` selects: these are enqueued on the current
        stream, because the next forward may change them.
        """
        starts, end = [], 0
        for item in ranges:
            starts.append(end)
            end += -(-item.flat.nbytes // _ALIGNMENT) * _ALIGNMENT
        devices = {item.flat.device for item in ranges if item.flat.is_cuda}
        if end > self._memory.numel():
            self.reserve(end, pinned_for=next(iter(devices), None))
        copies, on_side_stream = [], []
        for item, start in zip(ranges, starts, strict=True):
            target = self._memory[start : start + item.flat.nbytes].view(item.flat.dtype)
            copies.append(item._replace(flat=target))
            if item.flat.is_cuda and not in_order(item):
                on_side_stream.append((target, item.flat))
            else:
                target.copy_(item.flat.detach(), non_blocking=True)
        events = [self._copy_on_side_stream(device, on_side_stream) for device in devices]
        return Snapshot(_after(events, copies) if events else copies, events)

    def _copy_on_side_stream(
        self, device: torch.device, pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> torch.cuda.Event:
        """Enqueue copies from one device after its present work; return the event of their end."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        done = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
        with torch.cuda.stream(stream):
            for target, flat in pairs:
                if flat.device == device:
                    target.copy_(flat.detach(), non_blocking=True)
                    flat.record_stream(stream)  # `flat` may be a temporary with no other owner
            done.record(stream)
        return done


def _unpin_and_free(unpin: Callable[[], object], memory: Tensor) -> None:
    """Unpin memory; the reference in the finalizer keeps it alive until then."""
    unpin()
    del memory


def _after(
    events: Iterable[torch.cuda.Event], ranges: Iterable[TensorRange]
) -> Iterator[TensorRange]:
    """Yield the ranges after waiting for events, in the thread that iterates."""
    for event in events:
        event.synchronize()
    yield from ranges
