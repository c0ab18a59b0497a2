"""The `Kernels` protocol: sums, casts and squares of flat tensors, and torch's implementation."""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    """Operations on flat contiguous tensors of one device, on its current stream. Local.

    All implementations give the same bits of sums and products, and sums of squares that agree to
    within 1e-12.
    """

    name: str  # "torch" or "cupy"

    def add(self, addends: Sequence[Tensor], total: Tensor) -> None:
        """Write the sum of addends, all of one length, to `total`.

        Adds in order, in `sum_dtype`, and rounds once. Addends have total's dtype or a narrower
        one; one of them may share total's memory.
        """

    def pack(self, source: Tensor, scale: float, target: Tensor) -> None:
        """Write `source` times `scale`, rounded to target's dtype, to `target`, of equal length.

        The product is computed in fp32, or fp64 if source is. A scale of 0 gives zeros for any
        values.
        """

    def square_sums(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of each tensor: fp64, one element each, on their device.

        Equal elements give equal bits at any address. An empty tensor gives 0.
        """


class TorchKernels:
    """The operations by torch, on any device."""

    name = "torch"

    def add(self, addends: Sequence[Tensor], total: Tensor) -> None:
        """Add in `sum_dtype`, two addends in one pass."""
        if len(addends) == 1:
            total.copy_(addends[0])
        elif len(addends) == 2 and addends[0].dtype == addends[1].dtype == total.dtype:
            torch.add(addends[0], addends[1], out=total)  # 16 bits are widened on the way
        else:
            _add_many(addends, total)

    def pack(self, source: Tensor, scale: float, target: Tensor) -> None:
        """Cast and multiply, in one pass where torch has the product in fp32."""
        wide = sum_dtype(source.dtype)
        if scale == 0:
            target.zero_()  # not a product: 0 * NaN is NaN
        elif scale == 1:
            target.copy_(source)
        elif source.dtype in (target.dtype, wide):
            torch.mul(source, scale, out=target)
        elif target.dtype == wide:
            target.copy_(source).mul_(scale)
        else:  # torch rounds 16-bit products to 16 bits, whatever the output's dtype
            target.copy_(source.to(wide).mul_(scale))

    def square_sums(self, tensors: Sequence[Tensor]) -> Tensor:
        """Sum squares in fp64."""
        if not tensors:
            return torch.zeros(0, dtype=torch.float64)
        # Copies, since on CUDA the address decides in which order torch adds.
        wide = (tensor.to(torch.float64, copy=True) for tensor in tensors)
        return torch.stack([torch.linalg.vector_norm(tensor) for tensor in wide]).square()


@cache
def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums accumulate: fp32 or wider; int64 for integers."""
    wide = torch.float32 if dtype.is_floating_point else torch.int64
    return torch.promote_types(dtype, wide)


def _add_many(addends: Sequence[Tensor], total: Tensor) -> None:
    """Add any number of addends of any dtypes."""
    wide = sum_dtype(total.dtype)
    shared_at = _shared_index(addends, total)
    if total.dtype != wide or shared_at > 1:
        # Addends before the one in total's memory, or all if total is too narrow for their sum.
        separate = shared_at if total.dtype == wide else len(addends)
        run = addends[0].to(wide, copy=True)
        for addend in addends[1:separate]:
            run.add_(addend)
        addends = [run, *addends[separate:]]
        shared_at = 1 if len(addends) > 1 else -1
    if shared_at == 1:
        torch.add(addends[0], total, out=total)
    elif shared_at < 0:
        total.copy_(addends[0])
    for addend in addends[max(shared_at, 0) + 1 :]:
        total.add_(addend)


def _shared_index(addends: Sequence[Tensor], total: Tensor) -> int:
    """Return the index of the addend that shares total's memory, or -1."""
    at = total.data_ptr()
    return next((i for i, addend in enumerate(addends) if addend.data_ptr() == at), -1)
