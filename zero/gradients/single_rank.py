"""The gradients of a single rank, which are their means over ranks."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.gradients.buckets import Gradients
from zero.gradients.slots import OwnSlots
from zero.kernels import in_memory_order, pack, rescale
from zero.layout import Bucket, ParameterSlice


class LocalGradients(Gradients):
    """The gradients of a single rank, which are the means already: nothing is copied.

    A scale of this rank's weight is not applied; a scale of 0 gives zeros. Shared memory of two
    gradients is separated, since both are multiplied in place.
    """

    slots: OwnSlots

    def __init__(self) -> None:
        super().__init__(OwnSlots())
        self._aside: dict[str, Tensor] = {}  # means of earlier reductions, by parameter name
        # By storage, the first and the next byte of gradients in this reduction, by name.
        self._memory: dict[int, dict[str, tuple[int, int]]] = {}

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Hold the gradients of more buckets, of parameters by name."""
        super().add(buckets, parameters)
        self.note_peak(self.nbytes)

    def begin(self) -> None:
        """Prepare for the first gradient of a reduction."""
        self._memory.clear()

    @torch.no_grad()
    def take(self, index: int, entry: ParameterSlice, scale: float) -> Tensor | None:
        """Leave the gradient in `parameter.grad`, dense and in the parameter's memory order.

        Returns it, or None where there is none.
        """
        name = entry.spec.name
        parameter = self.slots.parameters[name]
        gradient = parameter.grad
        if gradient is None:
            return None
        own = in_memory_order(gradient, parameter)
        start, stop = own.data_ptr(), own.data_ptr() + own.nbytes
        others = self._memory.setdefault(own.untyped_storage().data_ptr(), {})
        if any(low < stop and start < high for o, (low, high) in others.items() if o != name):
            own = own.clone()
        else:
            others[name] = start, stop
        if scale == 0:
            own.zero_()
        self.slots.publish(name, own)
        return own

    def accumulate(self, index: int, entry: ParameterSlice) -> None:
        """Leave the gradient in `parameter.grad`."""
        self.take(index, entry, 1.0)

    def own(self) -> list[Tensor]:
        """Return the gradients that there are."""
        return [p.grad for p in self.slots.parameters.values() if p.grad is not None]

    def separate(self) -> None:
        """Keep held means apart from a coming reduction, to whose result `finish` adds them."""
        if self.held:
            means = {name: self.slots.pop(name) for name in self.slots.parameters}
            self._aside |= {name: mean for name, mean in means.items() if mean is not None}
        self.held = False
        self.slots.void()

    @torch.no_grad()
    def finish(self, factor: float, unused: Collection[str], of_held: float = 1.0) -> None:
        """Multiply the gradients by a factor, add those that were held, and hold them."""
        self.scale_(factor)
        for name, mean in self._aside.items():
            rescale([mean], of_held)
            gradient = self.slots.parameters[name].grad
            self.slots.publish(name, mean if gradient is None else mean.add_(gradient))
        self._aside.clear()
        self.held = True

    @torch.no_grad()
    def collect(self) -> frozenset[str]:
        """Take over what was done to `parameter.grad` since `finish`. Local.

        Returns the names of parameters whose `grad` is None.
        """
        places = [(i, e) for i, bucket in enumerate(self.buckets) for e in bucket.entries]
        return frozenset(e.spec.name for i, e in places if self.take(i, e, 1.0) is None)

    def reduced(self, index: int, piece: ParameterSlice) -> Tensor:
        """Return a slice of the gradient; an empty tensor if there is none."""
        parameter = self.slots.parameters[piece.spec.name]
        if parameter.grad is None:
            return parameter.new_empty(0)
        flat = parameter.grad.detach().as_strided((piece.spec.numel,), (1,))
        return flat[piece.low : piece.high]

    def kept(self, index: int) -> list[Tensor]:
        """Return the gradients of a bucket, of which some parameters may have none."""
        names = [entry.spec.name for entry in self.buckets[index].entries]
        return [g for name in names if (g := self.slots.parameters[name].grad) is not None]

    def widened(self, index: int, factor: float) -> Tensor:
        """Return the gradients of a bucket in fp32 and times a factor; zeros where there is none.

        Flat, in a new tensor. The gradients themselves are multiplied, too.
        """
        bucket = self.buckets[index]
        device = self.slots.parameters[bucket.entries[0].spec.name].device
        wide = torch.zeros(bucket.numel, dtype=torch.float32, device=device)
        for entry in bucket.entries:
            if not self.slots.dropped(entry.spec.name):
                pack(self.reduced(index, entry), factor, wide[entry.start : entry.stop])
        rescale(self.kept(index), factor)
        self.note_wide(index, wide)
        return wide

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiply every gradient."""
        rescale(self.own(), factor)

    @torch.no_grad()
    def clear(self, set_to_none: bool) -> None:
        """Discard all gradients, or zero those that there are."""
        self.forget()
        self.held = not set_to_none
        for parameter in self.slots.parameters.values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def forget(self) -> None:
        """Forget what is kept, after every `p.grad` was dropped."""
        self._aside.clear()
        self.held = False
        self.begin()
