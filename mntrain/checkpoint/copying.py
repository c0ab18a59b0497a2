"""Copies of what is to be saved, so that training may change it while it is written."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNED = 64


class Range(NamedTuple):
    """Elements of a tensor of a file: flat, and from `low` on."""

    file: str
    name: str
    flat: Tensor
    low: int


class Room:
    """Host memory for copies. It is kept: fresh pages would cost more than the copy itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int, *, pinned: bool) -> None:
        """Have this much memory, with its pages."""
        self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._memory.zero_()

    def copied(self, ranges: Sequence[Range]) -> list[Range]:
        """The same ranges in this memory, in place of what was copied before.

        Returns when all is there. From a device they come into pinned memory, all at once.
        """
        starts, end = [], 0
        for one in ranges:
            starts.append(end)
            end += -(-one.flat.nbytes // _ALIGNED) * _ALIGNED
        on_device = any(one.flat.is_cuda for one in ranges)
        if end > self._memory.numel():
            self.reserve(end, pinned=on_device)
        copies = []
        for one, start in zip(ranges, starts, strict=True):
            there = self._memory[start : start + one.flat.nbytes].view(one.flat.dtype)
            there.copy_(one.flat.detach(), non_blocking=True)
            copies.append(one._replace(flat=there))
        if on_device:
            torch.cuda.synchronize()
        return copies
