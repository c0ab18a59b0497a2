"""Asynchronous copies between the memory of a GPU and of the host.

Nothing here waits for the GPU. An event is a point in its work, which the host queries and streams
wait for.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from zero.collectives import Work

Copies = Iterable[tuple[Tensor, Tensor]]  # (target, source)


class DeviceCopy:
    """Copies of a GPU, with one stream for each direction and one for computation.

    caller's stream    backward | e0            | ...
    copy to host                  wait e0, copy | e1
    side stream                                   wait e1, add | e2
    copy to device                                               wait e2, copy

    One thread at a time uses it. `warning` is the reason why copies are slower than they could be.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.warning = ""
        self._to_host, self._to_device, self._side = (torch.cuda.Stream(device) for _ in range(3))

    def owns(self, tensor: Tensor) -> bool:
        """Return True if a tensor lies on the device."""
        return tensor.device == self._device

    def record_event(self) -> torch.cuda.Event:
        """Return the point that the caller's current stream reaches next."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def record_time(self) -> torch.cuda.Event:
        """Return the point that the caller's current stream reaches next, with its time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait_on_stream(self, event: torch.cuda.Event) -> None:
        """Make later work on the caller's current stream wait; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def side_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the stream for computation is the current one."""
        return torch.cuda.stream(self._side)

    def record_stream(self, tensor: Tensor) -> None:
        """Keep the tensor's memory from reuse until the current stream has finished with it."""
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def pin(self, memory: Tensor) -> Callable[[], object]:
        """Page-lock host memory, as the function `pin` does, and return what unlocks it.

        If the driver refuses, copies still work, but are slower, and `warning` says so.
        """
        unpin, self.warning = pin(memory, self._device)

        def unpin_when_idle() -> None:
            self._to_host.synchronize()
            self._to_device.synchronize()
            unpin()

        return unpin_when_idle

    def copy_to_host(self, copies: Copies, *after: torch.cuda.Event) -> torch.cuda.Event:
        """Start to copy tensors of the device to the host, after events; return the end."""
        return self._copy(self._to_host, copies, after)

    def copy_to_device(self, copies: Copies) -> torch.cuda.Event:
        """Start to copy host memory to tensors of the device; return the end."""
        return self._copy(self._to_device, copies, ())

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


class StreamOrderedWork:
    """Work whose result is ordered for the caller's stream, but may not be ready for the host.

    `end` returns the event of its end. Each `wait` calls it, and others may call it before. It
    waits for the work `before`, if there is one.
    """

    def __init__(
        self,
        copier: DeviceCopy,
        end: Callable[[], torch.cuda.Event],
        before: Work | None = None,
    ) -> None:
        self._copier, self._end, self._before = copier, end, before

    def done(self) -> bool:
        """Return whether the device has come to the end. Local."""
        return (self._before is None or self._before.done()) and bool(self._end().query())

    def wait(self) -> None:
        """Make the caller's stream wait for the end."""
        self._copier.wait_on_stream(self._end())


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
