"""The largest sums between nodes: 8 bytes for each that is sent, of 1 % of them.

What is not sent is added to the next step's sums, so that every gradient arrives in the end.

Sources: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017,
arXiv 1704.05021; Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599.
"""

import math

import torch
from torch import Tensor

from zero.between_nodes import GatheredHook
from zero.codes import aligned, largest


class TopKHook(GatheredHook):
    """Exchanges the `fraction` of each lane that is largest in magnitude, with error feedback.

    At least one element of each lane is sent, in fp32 (of fp64 gradients in fp64), with its index.
    If any sum of a lane is not finite, the first one that is sent is NaN.
    """

    def __init__(self, fraction: float = 0.01) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction is {fraction!r}: give the part to send, above 0, to 1")
        self.fraction = float(fraction)

    def count(self, numel: int) -> int:
        """Return how many of so many elements are sent."""
        return math.ceil(numel * self.fraction)

    def code_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of the values and their indices."""
        count = self.count(numel)
        return aligned(count * dtype.itemsize) + count * _index_dtype(numel).itemsize

    def encode(self, sums: Tensor, code: Tensor) -> None:
        """Write values and indices, and leave zeros in their places."""
        values, indices = self._parts(code, sums)
        places = largest(sums.abs(), len(values))
        torch.index_select(sums, 0, places, out=values)
        values[0] += (sums * 0).sum()  # 0, or NaN
        indices.copy_(places)
        sums[places] = 0.0

    def decode(self, code: Tensor, total: Tensor) -> None:
        """Add the values at their indices, of which no two are equal."""
        values, indices = self._parts(code, total)
        total.index_add_(0, indices.long(), values)

    def _parts(self, code: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of a code: the values, and their indices."""
        count, index_dtype = self.count(len(sums)), _index_dtype(len(sums))
        nbytes = count * sums.dtype.itemsize
        middle = aligned(nbytes)
        end = middle + count * index_dtype.itemsize
        return code[:nbytes].view(sums.dtype), code[middle:end].view(index_dtype)


def _index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= torch.iinfo(torch.int32).max else torch.int64


HOOKS = {"topk": TopKHook}
