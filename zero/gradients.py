"""The memory that gradients lie in until they are summed over ranks: two ways of one contract.

    zero.held      one flat tensor a bucket, for the whole step; every gradient is a view into it
    zero.passing   a few working tensors that buckets take turns in; only this rank's shards stay

A bucket's life: gradients arrive, the bucket is launched, and when its reduction is over, what this
rank is to keep of it can be had.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Work
from zero.layout import Bucket, Entry


class Reduce(Protocol):
    """Start the reduction of a bucket, in place on its flat gradients. Collective."""

    def __call__(self, bucket: Bucket, flat: Tensor) -> Work:
        """Give what to wait for."""


class Gradients(Protocol):
    """Where the gradients of buckets lie, and what becomes of them."""

    peak_kept: int  # bytes: the most that gradients took outside of working tensors
    working: int  # bytes of the working tensors

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Make room for more buckets, of parameters by name."""

    def arrive(self, index: int, entry: Entry) -> None:
        """Take the gradient that backward has just made for a parameter of a bucket."""

    def launch(self, index: int, scale: float) -> Tensor:
        """Multiply a bucket by `scale` and start its reduction. Collective.

        Parameters without a gradient count as zeros. Gives a 0-dim tensor that is 0 where this
        rank's part was finite, and NaN where it was not.
        """

    def has_stray(self, index: int, entry: Entry) -> bool:
        """Whether a parameter has a gradient that no backward brought. Before `launch`."""

    def finish(self) -> None:
        """Wait for every reduction."""

    def kept(self, index: int) -> Tensor:
        """The sum over ranks of what this rank keeps of a bucket, flat. After `finish`."""

    def widened(self, index: int) -> Tensor:
        """The same as `kept`, 16-bit sums in fp32; what `kept` gave is lost."""

    def zero(self) -> None:
        """Forget all gradients."""


def scaled(flat: Tensor, scale: float) -> Tensor:
    """Multiply in place. Gives 0 if the result is finite, NaN if not: a 0-dim tensor."""
    if scale == 0:
        flat.zero_()  # not a product: a loss over no samples is NaN, and 0 * NaN as well
    elif scale != 1:
        flat.mul_(scale)
    wide = torch.promote_types(flat.dtype, torch.float32)
    return flat.sum(dtype=wide) * 0
