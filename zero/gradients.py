"""The memory that gradients lie in until they are summed over ranks: three ways of one contract.

    zero.flat_gradients      one flat tensor a bucket, for the whole step; every gradient is a view into it
    zero.sharded_gradients   a few working tensors that buckets take turns in; only this rank's shards stay
    zero.alone     where backward made them: there is no other rank, at any stage

In every round each gradient of a bucket is taken, the bucket is launched, and when its reduction is
over, what this rank is to keep of it can be had.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Work
from zero.kernels import Kernels
from zero.layout import Bucket, BucketEntry, ParameterSlice


class Reduce(Protocol):
    """Start the reduction of a bucket, in place on its flat gradients. Collective."""

    def __call__(self, bucket: Bucket, flat: Tensor) -> Work:
        """Give what to wait for."""


class Gradients(Protocol):
    """Where the gradients of buckets lie, and what becomes of them."""

    peak_kept: int  # bytes: the most that gradients took outside of working tensors
    working: int  # bytes of the working tensors

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Make room for more buckets, of parameters by name. Collective."""

    def hold(self, index: int, entry: BucketEntry) -> None:
        """Take a gradient that backward has just made, and to which more will be added."""

    def take(self, index: int, entry: BucketEntry, scale: float) -> Tensor | None:
        """Take a parameter's gradient of this round, times `scale`; none counts as zeros.

        Once a round for every parameter of a bucket, and before `launch`. A scale of 0 makes zeros
        of anything. Gives what is to be summed, or None where there was no gradient.
        """

    def launch(self, index: int) -> None:
        """Start the reduction of a bucket. Collective."""

    def has_stray(self, index: int, entry: BucketEntry) -> bool:
        """Whether a parameter has a gradient that no backward brought. Before `take`."""

    def finish(self) -> None:
        """Wait for every reduction."""

    def part(self, index: int, piece: ParameterSlice) -> Tensor:
        """The sum over ranks of a piece of what this rank keeps of a bucket. After `finish`.

        Flat, a view: elements in the order in which the parameter lies in memory.
        """

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """All that this rank keeps of a bucket of 16 bits, flat, in fp32 and times a factor.

        `part` has lost it.
        """

    def release(self) -> None:
        """Note that a step is over, and that nobody will ask for parts of its sums."""

    def zero(self, set_to_none: bool) -> None:
        """Forget all gradients. Parameters have none, or views of zeros where there are views."""


@torch.no_grad()
def put(mine: Tensor, gradient: Tensor, scale: float) -> None:
    """Write a gradient times a scale: one pass over memory."""
    if scale == 0:
        mine.zero_()  # not a product: a loss over no samples is NaN, and 0 * NaN as well
    elif scale == 1:
        mine.copy_(gradient.to_dense())
    else:
        torch.mul(gradient.to_dense(), scale, out=mine)


def rescale_all(gradients: Sequence[Tensor], scale: float) -> None:
    """The same for many at once: on a GPU in a few kernels."""
    if scale not in (0, 1) and any(gradient.is_cuda for gradient in gradients):
        torch._foreach_mul_(list(gradients), scale)
        return
    for gradient in gradients:
        rescale(gradient, scale)


def rescale(gradient: Tensor, scale: float) -> None:
    """Multiply a gradient without a graph in place, if there is anything to do."""
    if scale == 0:
        gradient.zero_()
    elif scale != 1:
        gradient.mul_(scale)
