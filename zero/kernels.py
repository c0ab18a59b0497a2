"""Sums, casts and squares of flat tensors: what a device may have faster kernels for than torch."""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    """Operations on flat contiguous tensors of one device, on its current stream. Local.

    Whoever implements them gives the same result: the same bits of sums and of products, and
    squares to within 1e-12 of each other.
    """

    name: str  # "torch" or "cupy"

    def add(self, addends: Sequence[Tensor], total: Tensor) -> None:
        """Leave the sum of addends in `total`, all of one length.

        Added in their order, in the dtype that `sum_dtype` gives, and rounded once. Addends have
        total's dtype or one that it widens; one of them may lie in total's memory.
        """

    def pack(self, source: Tensor, scale: float, target: Tensor) -> None:
        """Leave `source` times `scale`, rounded to target's dtype, in `target`, of equal length.

        The product is in fp32, or in fp64 where source is. A scale of 0 makes zeros of anything.
        """

    def square_sums(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sum of squares of each tensor: a new fp64 tensor on their device, one element each.

        Of equal elements it has equal bits, wherever in memory they lie. Of none it is 0.
        """


class TorchKernels:
    """The operations in torch alone, on any device."""

    name = "torch"

    def add(self, addends: Sequence[Tensor], total: Tensor) -> None:
        """See `Kernels.add`."""
        if len(addends) == 1:
            total.copy_(addends[0])
        elif len(addends) == 2 and addends[0].dtype == addends[1].dtype == total.dtype:
            torch.add(addends[0], addends[1], out=total)  # 16 bits are widened on the way
        else:
            _add_many(addends, total)

    def pack(self, source: Tensor, scale: float, target: Tensor) -> None:
        """See `Kernels.pack`."""
        wide = sum_dtype(source.dtype)
        if scale == 0:
            target.zero_()  # not a product: 0 * NaN is NaN
        elif scale == 1:
            target.copy_(source)
        elif source.dtype in (target.dtype, wide):
            torch.mul(source, scale, out=target)
        elif target.dtype == wide:
            target.copy_(source).mul_(scale)
        else:  # torch rounds products of 16 bits to 16 bits, whatever they are to become
            target.copy_(source.to(wide).mul_(scale))

    def square_sums(self, tensors: Sequence[Tensor]) -> Tensor:
        """See `Kernels.square_sums`."""
        if not tensors:
            return torch.zeros(0, dtype=torch.float64)
        # A new tensor of each: where the elements lie decides in which order torch adds on CUDA.
        wide = (tensor.to(torch.float64, copy=True) for tensor in tensors)
        return torch.stack([torch.linalg.vector_norm(tensor) for tensor in wide]).square()


@cache
def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums accumulate: fp32, or wider where the tensor is; integers as int64."""
    wide = torch.float32 if dtype.is_floating_point else torch.int64
    return torch.promote_types(dtype, wide)


def _add_many(addends: Sequence[Tensor], total: Tensor) -> None:
    """`Kernels.add`, for any number and dtypes of addends."""
    wide = sum_dtype(total.dtype)
    place = _place(addends, total)
    if total.dtype != wide or place > 1:
        # Those before the one that lies in total's memory, or all if they need more bits than it.
        alone = place if total.dtype == wide else len(addends)
        run = addends[0].to(wide, copy=True)
        for addend in addends[1:alone]:
            run.add_(addend)
        addends = [run, *addends[alone:]]
        place = 1 if len(addends) > 1 else -1
    if place == 1:
        torch.add(addends[0], total, out=total)
    elif place < 0:
        total.copy_(addends[0])
    for addend in addends[max(place, 0) + 1 :]:
        total.add_(addend)


def _place(addends: Sequence[Tensor], total: Tensor) -> int:
    """The index of the addend that lies in total's memory; -1 where none does."""
    at = total.data_ptr()
    return next((i for i, addend in enumerate(addends) if addend.data_ptr() == at), -1)
