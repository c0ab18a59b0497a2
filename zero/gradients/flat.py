"""Flat gradient buckets of stages 0 and 1."""

from collections.abc import Mapping, Sequence
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.comm_hooks import ChainedWork, wait_all
from zero.gradients.sums import Gradients
from zero.kernels import Kernels, copy_scaled, own_view, rescale
from zero.layout import Bucket, ParameterSlice
from zero.precision import is_16_bit


class FlatGradients(Gradients):
    """Flat gradient buckets for stages 0 and 1, of which stage 1 keeps this rank's shard.

    At the first backward parameters have no gradients, so autograd hands over its own tensor, which
    is copied and scaled into the bucket in one pass; zeroing and accumulating would be three. Later
    micro-batches accumulate in place. At stage 0, `parameter.grad` is a view of the bucket.
    """

    def __init__(self, collectives: Collectives, stage: int) -> None:
        super().__init__(collectives, stage)
        self._memory: list[Tensor] = []  # of each bucket; longer than it by the padding
        self._views: dict[str, Tensor] = {}  # gradients by parameter name
        self._shown: dict[str, ReferenceType[Tensor]] = {}  # aliases of them in `parameter.grad`
        self._wide_bytes: dict[int, int] = {}  # of fp32 gradients that do not fit into `_memory`
        self._wide: dict[int, Tensor] = {}  # those that have replaced the 16-bit ones
        self._works: list[Work] = []

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate one flat tensor for each bucket. Collective."""
        for bucket in buckets:
            device = parameters[bucket.entries[0].spec.name].device
            numel = padded_numel(bucket) if self._stage else bucket.numel
            memory = self._collectives.allocate(numel, bucket.dtype, device)
            self._memory.append(memory)
            for entry in bucket.entries:
                name = entry.spec.name
                self._views[name] = own_view(memory, entry.start, parameters[name])
        super().add(buckets, parameters)
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def take(self, index: int, entry: ParameterSlice, scale: float) -> Tensor | None:
        """Copy the gradient into its bucket, unless it has accumulated there."""
        name = entry.spec.name
        slot, accumulated = self._views[name], not self._stage and self.keeps(name)
        gradient = self._pop(name)
        if accumulated or gradient is slot:
            rescale([slot], scale)
            return slot
        self._leave_to_user(name)
        return copy_scaled(slot, gradient, scale)

    def accumulate(self, index: int, entry: ParameterSlice) -> None:
        """Copy the gradient into its bucket, where later micro-batches accumulate in place."""
        name = entry.spec.name
        self.take(index, entry, 1.0)
        if self._stage:
            self._unavailable[name].arrived = self._views[name]
        else:
            self._parameters[name].grad = self._published(name)

    def flat(self, index: int) -> Tensor:
        """Return the bucket without its padding."""
        return self._memory[index][: self._buckets[index].numel]

    def launched(self, index: int, work: Work) -> None:
        """Record the reduction, which `wait` waits for, and advance the one before.

        So the second collective of a chain overlaps backward, too. The first one of a hook between
        nodes stays in the node, and is over soon.
        """
        before = self._works[-1] if self._works else None
        self._works.append(work)
        if isinstance(before, ChainedWork):
            before.advance()

    def wait(self) -> None:
        """Wait for every reduction."""
        works, self._works = self._works, []
        wait_all(works)

    def kept(self, index: int) -> Tensor:
        """Return this rank's part of the bucket, or its fp32 gradients that have replaced it."""
        if index in self._wide:
            return self._wide[index]
        return self.flat(index)[slice(*self._range(index))]

    def begin(self) -> None:
        """Prepare for the first gradient of a reduction."""
        super().begin()
        self._wide.clear()

    def void(self) -> None:
        """Drop what `parameter.grad` holds of an earlier mean; other ranks hold it, too. Local."""
        for parameter in self._parameters.values() if not self._stage else ():
            parameter.grad = None

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """Return the kept part in fp32, which overwrites `kept` if it fits into the bucket."""
        memory, kept = self._memory[index], self.kept(index)
        size = kept.numel() * torch.float32.itemsize
        if size <= memory.nbytes:
            wide = memory.view(torch.uint8)[:size].view(torch.float32)
            kept = kept.clone()
            self._wide[index] = wide
        else:
            wide = torch.empty_like(kept, dtype=torch.float32)
            self._wide_bytes[index] = size
            self.peak_bytes = max(self.peak_bytes, self._bytes + sum(self._wide_bytes.values()))
        kernels.pack(kept, factor, wide)
        return wide

    def forget(self) -> None:
        """Forget what is kept."""
        super().forget()
        self._wide.clear()

    def keeps(self, name: str) -> bool:
        """Return whether a parameter's `grad` is still the view of its bucket, or stands for it."""
        if self._stage:
            return super().keeps(name)
        shown = self._shown.get(name)
        return shown is not None and shown() is self._parameters[name].grad is not None

    @property
    def _bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def _published(self, name: str) -> Tensor:
        if self._stage:
            return self._unavailable[name]
        shown = self._shown.get(name)
        alias = shown() if shown is not None else None
        if alias is None:
            alias = self._views[name].detach()
            self._shown[name] = ref(alias)
        return alias

    def _leave_to_user(self, name: str) -> None:
        """Give the last gradient memory of its own, if the user still holds it, as in torch."""
        shown = self._shown.pop(name, None)
        held = shown() if shown is not None else None
        if held is not None:
            held.data = held.clone()

    def _adopt(self, index: int, entry: ParameterSlice) -> bool:
        if self._stage:
            return super()._adopt(index, entry)
        name = entry.spec.name
        parameter = self._parameters[name]
        gradient = parameter.grad
        if not self.keeps(name):
            self._leave_to_user(name)
            copy_scaled(self._views[name], gradient, 1.0)  # the user's own, or zeros
            parameter.grad = None if gradient is None else self._published(name)
        return gradient is not None


def padded_numel(bucket: Bucket) -> int:
    """Return the elements of a bucket's memory at stage 1, in which half of it fits in fp32."""
    return bucket.numel + (bucket.numel % 2 if is_16_bit(bucket.dtype) else 0)
