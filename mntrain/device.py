"""Devices: which one a rank gets, and how its tensors reach host memory and come back.

MPI moves host memory. On the CPU a tensor lies there already; on CUDA it goes through a pinned
buffer on a side stream:

    caller's stream   ... backward fills the bucket | E1 |  goes on with backward        | wait E2
    side stream                              wait E1 | copy to host |      | copy back | E2 |
    communication thread                                    asks    | MPI |
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from zero.collectives import Done, Work


class Loan(Protocol):
    """A tensor on its way through a collective."""

    host: Tensor  # the content in host memory, once it is here

    def here(self) -> bool:
        """Whether the content is in host memory. Asks for it, and does not wait."""

    def give_back(self) -> Work:
        """Bring what is in host memory back to the tensor. On the communication thread.

        The work is waited for on the caller's thread.
        """


class InPlace:
    """A tensor that lies in host memory: MPI works on it directly."""

    def __init__(self, tensor: Tensor) -> None:
        self.host = tensor

    def here(self) -> bool:
        """See `Loan.here`."""
        return True

    def give_back(self) -> Work:
        """See `Loan.give_back`."""
        return Done()


class PinnedStaging:
    """Pinned buffers and the side stream of one CUDA device.

    As many buffers as loans were under way at a time, each as large as the largest it has held.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._free: list[Tensor] = []

    def lend(self, tensor: Tensor) -> Loan:
        """Start a loan of a flat CUDA tensor, as it is after the work now on the current stream."""
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(tensor.device))
        return StagedLoan(self, tensor, ready)

    def take(self, nbytes: int) -> Tensor:
        """A pinned buffer of at least so many bytes. On the communication thread, as `put`."""
        fitting = [buffer for buffer in self._free if len(buffer) >= nbytes]
        if not fitting:
            if self._free:
                self._free.pop()
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        best = min(fitting, key=len)
        self._free = [buffer for buffer in self._free if buffer is not best]
        return best

    def put(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        self._free.append(buffer)


class StagedLoan:
    """A CUDA tensor that goes through a pinned buffer of its device."""

    def __init__(self, staging: PinnedStaging, tensor: Tensor, ready: torch.cuda.Event) -> None:
        self._staging, self._tensor, self._ready = staging, tensor, ready
        self._copied: torch.cuda.Event | None = None

    def here(self) -> bool:
        """See `Loan.here`."""
        if self._copied is None:
            nbytes = self._tensor.numel() * self._tensor.element_size()
            self._buffer = self._staging.take(nbytes)
            self.host = self._buffer[:nbytes].view(self._tensor.dtype)
            self._copied = self._on_stream(self._ready, self.host, self._tensor)
        return bool(self._copied.query())

    def give_back(self) -> Work:
        """See `Loan.give_back`."""
        back = self._on_stream(None, self._tensor, self.host)
        self._tensor.record_stream(self._staging.stream)
        # Its next user copies into it on the same stream, and so after this copy out of it.
        self._staging.put(self._buffer)
        return StreamOrder(back, self._tensor.device)

    def _on_stream(self, after: torch.cuda.Event | None, to: Tensor, source: Tensor) -> Any:
        """Copy on the side stream; the event of its end."""
        stream, done = self._staging.stream, torch.cuda.Event()
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            to.copy_(source, non_blocking=True)
            done.record(stream)
        return done


class StreamOrder:
    """Work whose result is ready for a stream, though perhaps not yet for the host."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        """Let the caller's current stream wait."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class Lender:
    """Lends tensors to the communication thread, whatever device they are on."""

    def __init__(self) -> None:
        self._staging: dict[torch.device, PinnedStaging] = {}

    def lend(self, tensor: Tensor) -> Loan:
        """Start a loan of a flat contiguous tensor, on the caller's thread."""
        if tensor.device.type == "cpu":
            return InPlace(tensor)
        if tensor.device not in self._staging:
            self._staging[tensor.device] = PinnedStaging(tensor.device)
        return self._staging[tensor.device].lend(tensor)


def move(batch: Any, device: torch.device, floats: torch.dtype | None = None) -> Any:
    """A batch with every tensor in it on a device: in tuples, lists and dicts, or by its own `to`.

    Tensors in pinned memory are copied without waiting. With `floats`, floating-point tensors are
    cast to that dtype.
    """
    if isinstance(batch, Tensor):
        dtype = floats if floats is not None and batch.is_floating_point() else batch.dtype
        return batch.to(device, dtype, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move(value, device, floats) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device, floats) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value, device, floats) for value in batch)
    return batch


def pick(wanted: str, local_rank: int) -> torch.device:
    """The device of a rank, by its place among the ranks of its host.

    `auto` is CUDA where there is any. With more ranks than GPUs, GPUs are shared. Raises ValueError
    for an unknown name, or for `cuda` where there is none.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {wanted!r} is unknown: choose auto, cpu or cuda")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "device cuda was asked for, but torch sees no GPU here: choose cpu or auto, or "
            "install a CUDA build of torch and make a GPU visible to the job"
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())
