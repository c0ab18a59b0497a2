"""Sums in one order, in fp32 or wider.

Sums are made here, not by MPI: MPI has no dependable sum for 16-bit floats, and bytes travel on
every MPI. Addends are taken in the order of members 0, 1, 2, ..., whoever adds: so the bits of a
sum do not depend on who owns the element.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from zero.kernels import sum_dtype

if TYPE_CHECKING:
    from mntrain.comm.mpi import Bytes


def as_bytes(tensor: Tensor) -> "Bytes":
    """The memory of a flat tensor, as MPI takes it. A view: no copy."""
    assert tensor.dim() == 1
    assert tensor.is_contiguous()
    data = tensor.view(torch.uint8)
    return data if data.is_cuda else data.numpy()


class Adder(Protocol):
    """Who adds."""

    def add(self, addends: Sequence[Tensor], total: Tensor, place: int | None) -> None:
        """Leave the sum of the addends, in their order, in `total`.

        `place`: the index of the addend that lies in total's memory, if one does. Addends have
        total's dtype, or one that it widens.
        """


class HostAdder:
    """Adds host tensors of one length. The memory to do so is kept from call to call."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def add(self, addends: Sequence[Tensor], total: Tensor, place: int | None) -> None:
        """See `Adder.add`."""
        wide = sum_dtype(total.dtype)
        if total.dtype != wide:
            run = self._empty(len(total), wide)
            run.copy_(addends[0])
            for addend in addends[1:]:
                run.add_(addend)
            total.copy_(run)
            return
        first = 0 if place is None else place
        if place is None:
            if len(addends) > 1 and addends[0].dtype == addends[1].dtype == wide:
                torch.add(addends[0], addends[1], out=total)
                first = 1
            else:
                total.copy_(addends[0])
        elif place == 1:
            torch.add(addends[0], total, out=total)
        elif place > 1:
            run = torch.add(addends[0], addends[1], out=self._empty(len(total), wide))
            for addend in addends[2:place]:
                run.add_(addend)
            torch.add(run, total, out=total)
        for addend in addends[first + 1 :]:
            total.add_(addend)

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        if len(self._room) < nbytes:
            self._room = torch.empty(nbytes, dtype=torch.uint8)
        return self._room[:nbytes].view(dtype)
