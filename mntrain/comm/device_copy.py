"""Copies between a device's memory and the host's, which go on while the host does something else.

Nothing here waits, but for what the host copies itself. A `DeviceEvent` is a point in a device's work: the
host asks whether it is over, and streams wait for it.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A point in a device's work."""

    def over(self) -> bool:
        """Whether the device has come so far. Asks, and does not wait."""

    def order(self) -> None:
        """Let what the caller gives the device from now on come after it."""


class DeviceCopy(Protocol):
    """Starts copies between one device and host memory. One thread at a time uses it."""

    concern: str  # what makes copies slower than they could be, if anything does

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the device."""

    def mark(self) -> DeviceEvent:
        """What the caller has given the device so far."""

    def pin(self, memory: Tensor) -> Callable[[], object]:
        """Make a piece of host memory fit for copies; gives what undoes it."""

    def fetch(
        self, host: Tensor, parts: Sequence[Tensor], after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """Copy tensors of the device into host memory, one behind the other."""

    def bring(
        self, parts: Sequence[Tensor], host: Tensor, after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """Copy host memory into tensors of the device, which lie in it one behind the other."""

    def beside(self) -> AbstractContextManager[Any]:
        """What the caller gives the device inside goes on beside the caller's other work."""


class CompletedEvent:
    """What has happened already."""

    def over(self) -> bool:
        """See `DeviceEvent.over`."""
        return True

    def order(self) -> None:
        """See `DeviceEvent.order`."""


class HostCopy:
    """The host, where a copy is over when the call returns."""

    concern = ""

    def has(self, tensor: Tensor) -> bool:
        """See `DeviceCopy.has`."""
        return tensor.device.type == "cpu"

    def mark(self) -> DeviceEvent:
        """See `DeviceCopy.mark`."""
        return CompletedEvent()

    def beside(self) -> AbstractContextManager[Any]:
        """See `DeviceCopy.beside`: the host has no beside."""
        return nullcontext()

    def pin(self, memory: Tensor) -> Callable[[], object]:
        """See `DeviceCopy.pin`: nothing to do."""
        return lambda: None

    def fetch(
        self, host: Tensor, parts: Sequence[Tensor], after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """See `DeviceCopy.fetch`."""
        for place, part in zip(laid_out(host, parts), parts, strict=True):
            place.copy_(part)
        return CompletedEvent()

    def bring(
        self, parts: Sequence[Tensor], host: Tensor, after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """See `DeviceCopy.bring`."""
        for place, part in zip(laid_out(host, parts), parts, strict=True):
            part.copy_(place)
        return CompletedEvent()


class CudaEvent:
    """An event of a CUDA device."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)
        self._device = stream.device

    def over(self) -> bool:
        """See `DeviceEvent.over`."""
        return bool(self.event.query())

    def order(self) -> None:
        """See `DeviceEvent.order`: the caller's current stream waits, and the host does not."""
        torch.cuda.current_stream(self._device).wait_event(self.event)


class CudaCopy:
    """A CUDA device, with a stream for each direction: copies there and back go on at once.

    And one for what is computed on the device meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.concern = ""
        self._down, self._up, self._beside = (torch.cuda.Stream(device) for _ in range(3))

    def has(self, tensor: Tensor) -> bool:
        """See `DeviceCopy.has`."""
        return tensor.device == self._device

    def mark(self) -> DeviceEvent:
        """See `DeviceCopy.mark`: on the caller's current stream."""
        return CudaEvent(torch.cuda.current_stream(self._device))

    def beside(self) -> AbstractContextManager[Any]:
        """See `DeviceCopy.beside`."""
        return torch.cuda.stream(self._beside)

    def pin(self, memory: Tensor) -> Callable[[], object]:
        """See `DeviceCopy.pin`. Where the driver refuses, copies are right, but slower."""
        unpin, self.concern = pin(memory, self._device)

        def when_done() -> None:
            self._down.synchronize()
            self._up.synchronize()
            unpin()

        return when_done

    def fetch(
        self, host: Tensor, parts: Sequence[Tensor], after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """See `DeviceCopy.fetch`."""
        return self._copy(self._down, zip(laid_out(host, parts), parts, strict=True), after)

    def bring(
        self, parts: Sequence[Tensor], host: Tensor, after: Sequence[DeviceEvent]
    ) -> DeviceEvent:
        """See `DeviceCopy.bring`."""
        return self._copy(self._up, zip(parts, laid_out(host, parts), strict=True), after)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        pairs: Iterable[tuple[Tensor, Tensor]],
        after: Sequence[DeviceEvent],
    ) -> DeviceEvent:
        with torch.cuda.stream(stream):
            for mark in after:
                mark.order()
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
                for tensor in (to, source):
                    if tensor.is_cuda:  # its memory is not given away before this stream is done
                        tensor.record_stream(stream)
            return CudaEvent(stream)


def pin(memory: Tensor, device: torch.device) -> tuple[Callable[[], object], str]:
    """Pin host memory where it is, for a GPU. Local.

    Gives what undoes it, to be called before the memory goes, and why it cannot be, if it cannot.
    torch's own pinned memory comes in powers of two, and is never given back.
    """
    runtime: Any = torch.cuda.cudart()
    address, nbytes = memory.data_ptr(), memory.numel() * memory.element_size()
    with torch.cuda.device(device):
        refused = int(runtime.cudaHostRegister(address, nbytes, 0))
        if not refused:
            return lambda: runtime.cudaHostUnregister(address), ""
        with suppress(RuntimeError):  # the next launch finds that error: let it be this one
            torch.ones(1, device=device)
    return lambda: None, f"the driver does not pin {nbytes} bytes of host memory (error {refused})"


def laid_out(host: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Where tensors lie one behind the other in host memory of their dtype."""
    return [host[low:high] for low, high in pairwise(accumulate(map(len, parts), initial=0))]
