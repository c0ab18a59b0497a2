"""Memory in which gradients are summed over ranks: the protocol, and flat buckets.

    zero.gradients.FlatGradients              stages 0 and 1: one flat tensor for each bucket
    zero.sharded_gradients.ShardedGradients   stage 2: working tensors that buckets share

A bucket is reduced once in a round, which is a whole step (stages 0 and 1) or one micro-batch
(stage 2): `take` is called for each of its parameters, then `flat` and `launched` for the bucket.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.comm_hooks import wait_all
from zero.kernels import Kernels
from zero.layout import Bucket, BucketEntry, ParameterSlice
from zero.precision import is_16_bit
from zero.tensor_views import nbytes, view


class Gradients(Protocol):
    """Storage for the gradients of buckets."""

    peak_bytes: int  # the most that gradients occupied outside of working tensors
    working_bytes: int  # of the working tensors

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate memory for more buckets, of parameters by name. Collective."""

    def accumulate(self, index: int, entry: BucketEntry) -> None:
        """Keep the gradient that backward has just made, to which later micro-batches add."""

    def take(self, index: int, entry: BucketEntry, scale: float) -> Tensor | None:
        """Copy a parameter's gradient of this round into its bucket, times `scale`.

        A parameter without a gradient contributes zeros. A scale of 0 gives zeros for any values.
        Returns the scaled gradient, or None where there was none.
        """

    def has_assigned(self, index: int, entry: BucketEntry) -> bool:
        """Return whether a parameter has a gradient that was assigned, not made by backward."""

    def flat(self, index: int) -> Tensor:
        """Return the flat gradients of a bucket, of which every gradient was taken."""

    def launched(self, index: int, work: Work) -> None:
        """Record the reduction of a bucket, to which its flat gradients belong from now on."""

    def finish(self) -> None:
        """Wait for every reduction."""

    def reduced(self, index: int, piece: ParameterSlice) -> Tensor:
        """Return the sum over ranks of a slice that this rank keeps, after `finish`. A view.

        Flat, with elements in the order in which the parameter lies in memory.
        """

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """Return all that this rank keeps of a 16-bit bucket, in fp32 and times a factor. Flat.

        Overwrites what `reduced` returned.
        """

    def clear(self, set_to_none: bool) -> None:
        """Discard all gradients: parameters get None, or zeros where the storage keeps views."""


class FlatGradients:
    """Flat gradient buckets for stages 0 and 1; every `parameter.grad` becomes a view of one.

    At the first backward of a step parameters have no gradients, so autograd hands over its own
    tensor, which is copied and scaled into the bucket in one pass; zeroing and accumulating would
    be three. Later micro-batches accumulate in place. With `sharded` this rank keeps its shard of a
    reduced bucket only.
    """

    def __init__(self, collectives: Collectives, *, sharded: bool) -> None:
        self._collectives = collectives
        self._slot = collectives.slot(collectives.rank) if sharded else None
        self._parameters: dict[str, Parameter] = {}
        self._buckets: list[Bucket] = []
        self._memory: list[Tensor] = []  # of each bucket; longer than it by the padding
        self._views: dict[str, Tensor] = {}  # gradients by parameter name
        self._wide_bytes: dict[int, int] = {}  # of fp32 gradients that do not fit into `_memory`
        self._works: list[Work] = []
        self.peak_bytes = self.working_bytes = 0

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate the flat buckets; they live as long as this object."""
        self._parameters.update(parameters)
        for bucket in buckets:
            device = parameters[bucket.entries[0].spec.name].device
            memory = self._collectives.allocate(padded_numel(bucket), bucket.dtype, device)
            self._buckets.append(bucket)
            self._memory.append(memory)
            self.peak_bytes += nbytes(memory)
            for entry in bucket.entries:
                parameter = parameters[entry.spec.name]
                self._views[entry.spec.name] = view(memory, entry.start, parameter)
                parameter.grad = None

    def accumulate(self, index: int, entry: BucketEntry) -> None:
        """Point `p.grad` at its view of the bucket, into which autograd accumulates."""
        self.take(index, entry, 1.0)

    def take(self, index: int, entry: BucketEntry, scale: float) -> Tensor | None:
        """Copy the gradient into its bucket slot, scaled, and point `p.grad` at it."""
        parameter, slot = self._parameters[entry.spec.name], self._views[entry.spec.name]
        gradient = parameter.grad
        if gradient is slot:
            rescale([slot], scale)
            return slot
        parameter.grad = slot
        if gradient is None:
            slot.zero_()
            return None
        copy_scaled(slot, gradient, scale)
        return slot

    def has_assigned(self, index: int, entry: BucketEntry) -> bool:
        """Return whether a parameter has a gradient other than zeros."""
        gradient = self._parameters[entry.spec.name].grad
        return gradient is not None and bool(gradient.any())

    def flat(self, index: int) -> Tensor:
        """Return the bucket, without its padding."""
        return self._memory[index][: self._buckets[index].numel]

    def launched(self, index: int, work: Work) -> None:
        """Record the reduction of a bucket."""
        self._works.append(work)

    def finish(self) -> None:
        """Wait for every reduction."""
        works, self._works = self._works, []
        wait_all(works)

    def reduced(self, index: int, piece: ParameterSlice) -> Tensor:
        """Return a slice of the bucket."""
        return self._memory[index][piece.start : piece.start + piece.numel]

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """Return fp32 gradients, in the bucket's own memory if they fit."""
        memory, bucket = self._memory[index], self._buckets[index]
        kept = self.flat(index)
        if self._slot is not None:
            kept = kept[slice(*bucket.shard(self._slot))]
        size = kept.numel() * torch.float32.itemsize
        if size <= nbytes(memory):
            wide = memory.view(torch.uint8)[:size].view(torch.float32)
            kept = kept.clone()
        else:
            wide = torch.empty_like(kept, dtype=torch.float32)
            self._wide_bytes[index] = size
            total = sum(map(nbytes, self._memory)) + sum(self._wide_bytes.values())
            self.peak_bytes = max(self.peak_bytes, total)
        kernels.pack(kept, factor, wide)
        return wide

    def clear(self, set_to_none: bool) -> None:
        """Set every `p.grad` to None, or to its view of a zeroed bucket."""
        self.finish()
        for name, parameter in self._parameters.items():
            parameter.grad = None if set_to_none else self._views[name]
        for memory in () if set_to_none else self._memory:
            memory.zero_()


def padded_numel(bucket: Bucket) -> int:
    """Return the elements of a bucket's memory, in which half of the bucket fits in fp32."""
    return bucket.numel + (bucket.numel % 2 if is_16_bit(bucket.dtype) else 0)


def flat_bytes(bucket: Bucket, owned: int) -> int:
    """Return the most bytes that `FlatGradients` takes for a bucket of which a rank keeps `owned`.

    `owned` counts elements.
    """
    narrow = padded_numel(bucket) * bucket.dtype.itemsize
    wide = owned * torch.float32.itemsize if is_16_bit(bucket.dtype) else 0
    return narrow + (wide if wide > narrow else 0)


@torch.no_grad()
def copy_scaled(target: Tensor, gradient: Tensor, scale: float) -> None:
    """Write a gradient times a scale into `target`, in one pass over memory."""
    if scale == 0:
        target.zero_()  # not a product: the mean loss over no samples is NaN, and 0 * NaN is NaN
    elif scale == 1:
        target.copy_(gradient.to_dense())
    else:
        torch.mul(gradient.to_dense(), scale, out=target)


def rescale(gradients: Sequence[Tensor], scale: float) -> None:
    """Multiply gradients in place; on a GPU in few kernels."""
    if scale == 1:
        return
    if scale != 0 and any(gradient.is_cuda for gradient in gradients):
        torch._foreach_mul_(list(gradients), scale)
        return
    for gradient in gradients:
        if scale == 0:
            gradient.zero_()  # not a product: 0 * NaN is NaN
        else:
            gradient.mul_(scale)
