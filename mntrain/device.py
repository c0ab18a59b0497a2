"""Devices: which one a rank gets, and how its tensors reach host memory and come back.

MPI moves host memory. On the CPU a tensor lies there already; on CUDA it goes through a pinned
buffer on a side stream:

    caller's stream   ... backward fills the bucket | E1 |  goes on with backward        | wait E2
    side stream                              wait E1 | copy to host |      | copy back | E2 |
    communication thread                                    sync    | MPI |
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from zero.collectives import Done, Work


class Loan(Protocol):
    """A tensor on its way through a collective."""

    def fetch(self) -> Tensor:
        """The tensor's content in host memory. On the communication thread."""

    def give_back(self) -> Work:
        """Bring what is in host memory back to the tensor. On the communication thread.

        The work is waited for on the caller's thread.
        """


class InPlace:
    """A tensor that lies in host memory: MPI works on it directly."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def fetch(self) -> Tensor:
        """See `Loan.fetch`."""
        return self._tensor

    def give_back(self) -> Work:
        """See `Loan.give_back`."""
        return Done()


class PinnedStaging:
    """The pinned buffer and the side stream of one CUDA device.

    Loans are fetched and given back one at a time, by the one communication thread, so one buffer
    serves them all; it grows to the largest tensor.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def lend(self, tensor: Tensor) -> Loan:
        """Start a loan of a flat CUDA tensor, as it is after the work now on the current stream."""
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(tensor.device))
        return StagedLoan(self, tensor, ready)

    def host(self, like: Tensor) -> Tensor:
        """Pinned memory of a tensor's shape and dtype: the same memory at every call."""
        nbytes = like.numel() * like.element_size()
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._buffer[:nbytes].view(like.dtype)


class StagedLoan:
    """A CUDA tensor that goes through its device's pinned buffer."""

    def __init__(self, staging: PinnedStaging, tensor: Tensor, ready: torch.cuda.Event) -> None:
        self._staging, self._tensor, self._ready = staging, tensor, ready
        self._host: Tensor | None = None

    def fetch(self) -> Tensor:
        """See `Loan.fetch`."""
        stream = self._staging.stream
        self._host = self._staging.host(self._tensor)
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            self._host.copy_(self._tensor, non_blocking=True)
        stream.synchronize()
        return self._host

    def give_back(self) -> Work:
        """See `Loan.give_back`."""
        assert self._host is not None
        stream = self._staging.stream
        back = torch.cuda.Event()
        with torch.cuda.stream(stream):
            self._tensor.copy_(self._host, non_blocking=True)
            back.record(stream)
        self._tensor.record_stream(stream)
        return StreamOrder(back, self._tensor.device)


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
