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


class SnapshotBuffer:
    """Host memory for snapshots, reused because fresh pages would cost more than the copy.

    `device` is that of the tensors; some of them may be on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    def reserve(self, nbytes: int) -> None:
        """Allocate and touch this much memory, pinned for copies from a GPU."""
        if self._unpin is not None:
            self._unpin()
        self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._memory.zero_()
        if self._stream is not None and nbytes:
            unpin, _ = pin(self._memory, self._device)  # unpinned copies are slower, but correct
            # The finalizer's reference keeps the memory alive until it is unpinned.
            self._unpin = weakref.finalize(self, lambda memory: unpin(), self._memory)

    def copy(
        self,
        ranges: Sequence[TensorRange],
        in_order: Callable[[TensorRange], bool] = lambda item: False,
    ) -> Iterable[TensorRange]:
        """Copy ranges into this memory, over the last snapshot; return them, to iterate over once.

        Copies from host memory are complete on return. Copies from a GPU are enqueued on a side
        stream, and iterating waits for them. Those of ranges that `in_order` selects are enqueued
        on the current stream, because the next forward may change the originals.
        """
        starts, end = [], 0
        for item in ranges:
            starts.append(end)
            end += -(-item.flat.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._memory.numel():
            self.reserve(end)
        copies, on_side_stream = [], []
        for item, start in zip(ranges, starts, strict=True):
            target = self._memory[start : start + item.flat.nbytes].view(item.flat.dtype)
            copies.append(item._replace(flat=target))
            if item.flat.is_cuda and not in_order(item):
                on_side_stream.append((target, item.flat))
            else:
                target.copy_(item.flat.detach(), non_blocking=True)
        if self._stream is None:
            return copies
        self._copied = _copy_on(self._stream, on_side_stream)
        return _after(self._copied, copies)

    def before_changes(self) -> None:
        """Make the current stream wait for the copies, before the originals are changed."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None


def _copy_on(stream: torch.cuda.Stream, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
    """Enqueue copies on a stream after the device's present work; return the event of their end."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    done = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
    with torch.cuda.stream(stream):
        for target, flat in pairs:
            target.copy_(flat.detach(), non_blocking=True)
            flat.record_stream(stream)  # `flat` may be a temporary with no other owner
        done.record(stream)
    return done


def _after(event: torch.cuda.Event, ranges: Iterable[TensorRange]) -> Iterator[TensorRange]:
    """Yield the ranges after waiting for an event, in the thread that iterates."""
    event.synchronize()
    yield from ranges
