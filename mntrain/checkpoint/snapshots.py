"""Copies of what training may change while it is written: tensors, and random generators."""

import random
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mntrain.comm.staging import pin

_ALIGNMENT = 64  # bytes, of a tensor in a snapshot
_PYTHON = struct.Struct("<?d")  # whether random.gauss has a cached value, and the value
_NUMPY = struct.Struct("<i?d")  # position, whether there is a cached normal value, the value


class TensorRange(NamedTuple):
    """Consecutive elements of a tensor in a file, flat, from element `low` on."""

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
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._unpin: Callable[[], object] = lambda: None

    def _reserve(self, nbytes: int) -> None:
        """Allocate this much memory, pinned for copies from a GPU."""
        self._unpin()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the old memory first
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self._device.type == "cuda":
            unpin, _ = pin(self._memory, self._device)  # unpinned copies are slower, but correct
            # The finalizer's reference keeps the memory alive until it is unpinned.
            self._unpin = weakref.finalize(self, lambda memory: unpin(), self._memory)

    def copy(self, ranges: Sequence[TensorRange]) -> Iterable[TensorRange]:
        """Copy ranges into this memory, over the last snapshot; return them, to iterate over once.

        Copies from host memory are complete on return. Copies from a GPU are enqueued on the
        current stream, before what changes the originals, and iterating waits for them.
        """
        starts, end = [], 0
        for item in ranges:
            starts.append(end)
            end += -(-item.flat.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._memory.numel():
            self._reserve(end)
        copies = []
        for item, start in zip(ranges, starts, strict=True):
            target = self._memory[start : start + item.flat.nbytes].view(item.flat.dtype)
            copies.append(item._replace(flat=target))
            target.copy_(item.flat.detach(), non_blocking=True)
        if self._device.type != "cuda":
            return copies
        copied = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        copied.record(torch.cuda.current_stream(self._device))
        return _after(copied, copies)


def _after(event: torch.cuda.Event, ranges: Iterable[TensorRange]) -> Iterator[TensorRange]:
    """Yield the ranges after waiting for an event, in the thread that iterates."""
    event.synchronize()
    yield from ranges


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return copies of the states of this process's random generators as bytes, by source."""
    version, words, gauss = random.getstate()
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    python = _PYTHON.pack(gauss is not None, gauss or 0.0)
    numpy = _NUMPY.pack(state["state"]["pos"], bool(state["has_gauss"]), state["gauss"])
    data = {
        "python": python + np.array([version, *words], dtype="<u4").tobytes(),
        "numpy": numpy + state["state"]["key"].astype("<u4").tobytes(),
    }
    states = {k: torch.frombuffer(bytearray(d), dtype=torch.uint8) for k, d in data.items()}
    states["torch"] = torch.get_rng_state()
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set this process's random generators to saved states, by source."""
    torch.set_rng_state(states["torch"])
    data = states["python"].numpy().tobytes()
    has_gauss, gauss = _PYTHON.unpack_from(data)
    version, *words = np.frombuffer(data[_PYTHON.size :], dtype="<u4").tolist()
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    data = states["numpy"].numpy().tobytes()
    position, has_gauss, gauss = _NUMPY.unpack_from(data)
    keys = np.frombuffer(data[_NUMPY.size :], dtype="<u4")
    np.random.set_state(("MT19937", keys, position, int(has_gauss), gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
