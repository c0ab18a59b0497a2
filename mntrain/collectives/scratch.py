"""Memory for what arrives, lent piece by piece and kept for the next one."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LEAST_BYTES = 4 << 10


class Scratch:
    """Rooms of sizes that are powers of two, on one device. One thread uses it."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    @contextmanager
    def lend(self, numel: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """A flat tensor of undefined content, until the block is left."""
        nbytes = numel * dtype.itemsize
        size = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)
        free = self._free[size]
        room = free.pop() if free else self._new(size)
        try:
            yield room[:nbytes].view(dtype)
        finally:
            free.append(room)

    def _new(self, size: int) -> Tensor:
        room = torch.empty(size, dtype=torch.uint8, device=self._device)
        if room.is_cuda:  # kernels may be under way that use what lay there, which MPI knows not
            torch.cuda.current_stream(self._device).synchronize()
        return room
