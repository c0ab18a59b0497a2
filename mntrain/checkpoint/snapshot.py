"""Copies of what is to be saved, so that training may change it while it is written.

On a GPU nobody waits for a copy but who needs it:

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

_ALIGNED = 64


class ByteRange(NamedTuple):
    """Elements of a tensor of a file: flat, and from `low` on."""

    file: str
    name: str
    flat: Tensor
    low: int


class Snapshot(NamedTuple):
    """Copies, perhaps still on their way."""

    ranges: Iterable[ByteRange]  # to be gone through once; waits until they are there
    events: Sequence[torch.cuda.Event]  # of their ends, by device; none from host memory

    def before_changes(self) -> None:
        """Let what is queued from now on, on this thread's streams, come after the copies."""
        for event in self.events:
            event.wait()


class SnapshotBuffer:
    """Host memory for copies. It is kept: fresh pages would cost more than the copy itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # that copies are made on

    def reserve(self, nbytes: int, *, pinned_for: torch.device | None) -> None:
        """Have this much memory, with its pages; for copies from a GPU pinned."""
        if self._unpin is not None:
            self._unpin()
        self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._memory.zero_()
        if pinned_for is not None and nbytes:
            undo, _ = pin(self._memory, pinned_for)  # else copies are slower, and as right
            self._unpin = weakref.finalize(self, _undo, undo, self._memory)

    def copied(
        self, ranges: Sequence[ByteRange], soon: Callable[[ByteRange], bool] = lambda one: False
    ) -> "Snapshot":
        """The same ranges in this memory, in place of what was copied before.

        From host memory all is there on return. From a device it is on its way into pinned memory,
        on a stream of its own: `soon` are those that the next forward may change, which are copied
        in order with it.
        """
        starts, end = [], 0
        for one in ranges:
            starts.append(end)
            end += -(-one.flat.nbytes // _ALIGNED) * _ALIGNED
        devices = {one.flat.device for one in ranges if one.flat.is_cuda}
        if end > self._memory.numel():
            self.reserve(end, pinned_for=next(iter(devices), None))
        copies = []
        for one, start in zip(ranges, starts, strict=True):
            there = self._memory[start : start + one.flat.nbytes].view(one.flat.dtype)
            copies.append(one._replace(flat=there))
        pairs = list(zip(copies, ranges, strict=True))
        for copy, one in pairs:
            if not one.flat.is_cuda or soon(one):
                copy.flat.copy_(one.flat.detach(), non_blocking=True)
        later = [(copy.flat, one.flat) for copy, one in pairs if one.flat.is_cuda and not soon(one)]
        events = [self._aside(device, later) for device in devices]
        return Snapshot(_when(events, copies) if events else copies, events)

    def _aside(
        self, device: torch.device, pairs: Iterable[tuple[Tensor, Tensor]]
    ) -> torch.cuda.Event:
        """Copy what lies on a device, after what is queued there; the event of the end of all."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        done = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        with torch.cuda.stream(stream):
            for there, flat in pairs:
                if flat.device == device:
                    there.copy_(flat.detach(), non_blocking=True)
                    flat.record_stream(stream)  # which may be a copy that nobody else holds
            done.record(stream)
        return done


def _undo(undo: Callable[[], object], memory: Tensor) -> None:
    """Unpin memory, which stays until then."""
    undo()
    del memory


def _when(events: Iterable[torch.cuda.Event], ranges: Iterable[ByteRange]) -> Iterator[ByteRange]:
    """Ranges, once they are there. Waits in the thread that reads them."""
    for event in events:
        event.synchronize()
    yield from ranges
