"""Gradients of a single process, which stay where autograd makes them."""

from collections.abc import Collection, Mapping, Sequence
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.gradients.sums import Gradients
from zero.kernels import Kernels, in_memory_order, rescale
from zero.layout import Bucket, ParameterSlice


class LocalGradients(Gradients):
    """The gradients of one rank: `parameter.grad` is autograd's own tensor, and nothing is copied.

    With one rank the gradient is the mean already, so a scale of this rank's weight is not applied;
    a scale of 0 gives zeros. Shared memory of two gradients is separated, since both are multiplied
    in place.
    """

    hides = False

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives, stage=0)
        self._addresses: dict[int, str] = {}  # of gradients in this reduction, with their names
        self._seen: dict[str, ReferenceType[Tensor]] = {}  # gradients that have been taken
        self._wide_bytes: dict[int, int] = {}  # of fp32 gradients, by bucket

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Watch more parameters. Allocates nothing."""
        super().add(buckets, parameters)
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def begin(self) -> None:
        """Prepare for the first gradient of a reduction."""
        self._addresses.clear()

    @torch.no_grad()
    def take(self, index: int, entry: ParameterSlice, scale: float) -> Tensor | None:
        """Leave the gradient in `parameter.grad`, dense and in the parameter's memory order."""
        name = entry.spec.name
        parameter = self._parameters[name]
        gradient = parameter.grad
        if gradient is None:
            return None
        own = in_memory_order(gradient, parameter)
        if self._addresses.setdefault(own.data_ptr(), name) != name:
            own = own.clone()
        if own is not gradient:
            parameter.grad = own
        if scale == 0:
            own.zero_()
        self._seen[name] = ref(own)
        return own

    def keeps(self, name: str) -> bool:
        """Return whether a parameter's `grad` is still the tensor that was taken."""
        seen = self._seen.get(name)
        return seen is not None and seen() is self._parameters[name].grad is not None

    def accumulate(self, index: int, entry: ParameterSlice) -> None:
        """Leave the gradient in `parameter.grad`."""
        self.take(index, entry, 1.0)

    def own(self) -> list[Tensor]:
        """Return the gradients that there are."""
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def wait(self) -> None:
        """Return at once: nothing is in flight."""

    def launched(self, index: int, work: Work) -> None:
        """Do nothing: the work has finished."""

    def reduced(self, index: int, piece: ParameterSlice) -> Tensor:
        """Return a slice of the gradient; an empty tensor if there is none."""
        parameter = self._parameters[piece.spec.name]
        if parameter.grad is None:
            return parameter.new_empty(0)
        flat = parameter.grad.detach().as_strided((piece.spec.numel,), (1,))
        return flat[piece.low : piece.high]

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """Return the gradients of a bucket in fp32, in a new tensor; zeros where there is none."""
        bucket = self._buckets[index]
        device = self._parameters[bucket.entries[0].spec.name].device
        wide = torch.zeros(bucket.numel, dtype=torch.float32, device=device)
        for entry in bucket.entries:
            if self.has_gradient(entry):
                kernels.pack(self.reduced(index, entry), factor, wide[entry.start : entry.stop])
        self._wide_bytes[index] = wide.nbytes
        self.peak_bytes = max(self.peak_bytes, self._bytes + sum(self._wide_bytes.values()))
        return wide

    @torch.no_grad()
    def set_aside(self) -> None:
        """Keep held means apart from a coming reduction."""
        if not self.held:
            return
        self.held = False
        for index, parameter in enumerate(self._parameters.values()):
            if parameter.grad is not None:
                self._aside[index], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def finish(self, factor: float, unused: Collection[str]) -> None:
        """Multiply the gradients by a factor, and hold them."""
        self.scale_(factor)
        for index, parameter in enumerate(self._parameters.values()):
            mean = self._aside.pop(index, None)
            if mean is not None:
                parameter.grad = mean if parameter.grad is None else mean.add_(parameter.grad)
        self.held = True

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiply every gradient."""
        rescale(self.own(), factor)

    @torch.no_grad()
    def clear(self, set_to_none: bool) -> None:
        """Discard all gradients, or zero those that there are."""
        self.forget()
        self.held = not set_to_none
        for parameter in self._parameters.values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    @property
    def _bytes(self) -> int:
        return sum(bucket.nbytes for bucket in self._buckets)

    def _adopt(self, index: int, entry: ParameterSlice) -> bool:
        return self.take(index, entry, 1.0) is not None
