"""Asynchronous copies between the memory of a device and of the host.

Nothing here waits for the device. A `DeviceEvent` is a point in a device's work that the host
queries and that streams wait for.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A point in a device's work."""

    def query(self) -> bool:
        """Return True if the device has reached the point. Does not wait."""

    def wait_on_stream(self) -> None:
        """Make later work on the caller's current stream wait for the point."""


class DeviceCopy(Protocol):
    """Copies between one device and host memory. One thread at a time uses it."""

    warning: str  # the reason why copies are slower than they could be; empty if they are not

    def owns(self, tensor: Tensor) -> bool:
        """Return True if a tensor lies on the device."""

    def record_event(self) -> DeviceEvent:
        """Return the point that the caller's current stream reaches next."""

    def pin(self, memory: Tensor) -> Callable[[], object]:
        """Page-lock host memory for fast copies, and return the function that unlocks it."""

    def copy_to_host(
        self, host: Tensor, parts: Sequence[Tensor], after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """Start to copy tensors of the device into host memory, end to end; return the end."""

    def copy_to_device(
        self, parts: Sequence[Tensor], host: Tensor, after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """Start to copy host memory into tensors of the device, end to end; return the end."""

    def side_stream(self) -> AbstractContextManager[Any]:
        """Return a context whose device work runs on a stream of its own."""

    def record_stream(self, tensor: Tensor) -> None:
        """Keep the tensor's memory from reuse until the current stream has finished with it."""


class CompletedEvent:
    """An event that has happened."""

    def query(self) -> bool:
        """Return True."""
        return True

    def wait_on_stream(self) -> None:
        """Do nothing."""


class HostCopy:
    """Copies on the host, which are complete when the call returns."""

    warning = ""

    def owns(self, tensor: Tensor) -> bool:
        """Return True for a tensor on the CPU."""
        return tensor.device.type == "cpu"

    def record_event(self) -> DeviceEvent:
        """Return a completed event."""
        return CompletedEvent()

    def side_stream(self) -> AbstractContextManager[Any]:
        """Return an empty context: the host has no streams."""
        return nullcontext()

    def record_stream(self, tensor: Tensor) -> None:
        """Do nothing."""

    def pin(self, memory: Tensor) -> Callable[[], object]:
        """Do nothing."""
        return lambda: None

    def copy_to_host(
        self, host: Tensor, parts: Sequence[Tensor], after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """Copy tensors into host memory, end to end."""
        for target, source in zip(split_like(host, parts), parts, strict=True):
            target.copy_(source)
        return CompletedEvent()

    def copy_to_device(
        self, parts: Sequence[Tensor], host: Tensor, after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """Copy host memory into tensors, end to end."""
        for target, source in zip(parts, split_like(host, parts), strict=True):
            target.copy_(source)
        return CompletedEvent()


class CudaEvent:
    """A point in a CUDA stream, recorded at construction."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)
        self._device = stream.device

    def query(self) -> bool:
        """Return True if the stream has reached the point."""
        return bool(self.event.query())

    def wait_on_stream(self) -> None:
        """Make the caller's current stream wait; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self.event)


class CudaCopy:
    """Copies of a CUDA device, with one stream for each direction and one for computation.

    caller's stream    backward | e0            | ...
    copy to host                  wait e0, copy | e1
    side stream                                   wait e1, add | e2
    copy to device                                               wait e2, copy
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.warning = ""
        self._to_host, self._to_device, self._side = (torch.cuda.Stream(device) for _ in range(3))

    def owns(self, tensor: Tensor) -> bool:
        """Return True for a tensor on this device."""
        return tensor.device == self._device

    def record_event(self) -> DeviceEvent:
        """Record an event on the caller's current stream."""
        return CudaEvent(torch.cuda.current_stream(self._device))

    def side_stream(self) -> AbstractContextManager[Any]:
        """Make the stream for computation the current one."""
        return torch.cuda.stream(self._side)

    def record_stream(self, tensor: Tensor) -> None:
        """Tell torch's allocator that the current stream uses the tensor."""
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def pin(self, memory: Tensor) -> Callable[[], object]:
        """Page-lock memory. Where the driver refuses, copies still work, but are slower."""
        unpin, self.warning = pin(memory, self._device)

        def unpin_when_idle() -> None:
            self._to_host.synchronize()
            self._to_device.synchronize()
            unpin()

        return unpin_when_idle

    def copy_to_host(
        self, host: Tensor, parts: Sequence[Tensor], after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """Copy on the stream to the host, after the events."""
        return self._copy(self._to_host, zip(split_like(host, parts), parts, strict=True), after)

    def copy_to_device(
        self, parts: Sequence[Tensor], host: Tensor, after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """Copy on the stream to the device, after the events."""
        return self._copy(self._to_device, zip(parts, split_like(host, parts), strict=True), after)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        pairs: Iterable[tuple[Tensor, Tensor]],
        after: Sequence[DeviceEvent],
    ) -> DeviceEvent:
        with torch.cuda.stream(stream):
            for event in after:
                event.wait_on_stream()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                for tensor in (target, source):
                    if tensor.is_cuda:
                        tensor.record_stream(stream)
            return CudaEvent(stream)


def pin(memory: Tensor, device: torch.device) -> tuple[Callable[[], object], str]:
    """Page-lock host memory in place, for a GPU. Local.

    Return the function that unlocks it, to be called before the memory is freed, and the reason if
    the driver refuses. torch's own pinned memory is not used: it comes in powers of two and is
    never given back.
    """
    runtime: Any = torch.cuda.cudart()
    address, nbytes = memory.data_ptr(), memory.numel() * memory.element_size()
    with torch.cuda.device(device):
        refused = int(runtime.cudaHostRegister(address, nbytes, 0))
        if not refused:
            return lambda: runtime.cudaHostUnregister(address), ""
        with suppress(RuntimeError):  # clear the error, which the next launch would report
            torch.ones(1, device=device)
    return lambda: None, f"the driver does not pin {nbytes} bytes of host memory (error {refused})"


def split_like(host: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return views of host memory with the lengths of `parts`, end to end."""
    return [host[low:high] for low, high in pairwise(accumulate(map(len, parts), initial=0))]
