"""The gradients of this rank's parameters, from autograd's to the means over ranks.

A reduction is one backward, with the gradients that `no_sync` left to it (stages 0 and 1), or one
micro-batch (stage 2). For each parameter, `take` moves its gradient into its bucket; then the
bucket is launched. `finish` makes means of the sums. From then on the means are `held` until
`clear`, and further backward passes add to them.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives
from zero.gradients.buckets import BucketMemory, BucketsInTurns, WholeBuckets
from zero.gradients.slots import OwnSlots, RefusedSlots, VisibleSlots
from zero.kernels import copy_scaled, in_memory_order, pack, rescale
from zero.layout import Bucket, ParameterSlice


class BucketGradients:
    """Gradients that are summed over ranks in buckets.

    `slots` are what `parameter.grad` is, and `memory` is where gradients are summed and means kept.
    """

    def __init__(
        self, slots: VisibleSlots | RefusedSlots, memory: WholeBuckets | BucketsInTurns
    ) -> None:
        self.slots, self.memory, self.held = slots, memory, False
        self._aside: dict[int, Tensor] = {}  # kept means of earlier reductions, by bucket
        self._aside_names: set[str] = set()

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate memory for more buckets, of parameters by name. Collective."""
        self.memory.add(buckets, parameters)
        for name, parameter in parameters.items():
            self.slots.add(name, parameter)

    # A reduction.

    def begin(self) -> None:
        """Prepare for the first gradient of a reduction."""
        if not self.slots.accumulate:
            self.set_aside()
        self.memory.begin()

    def take(self, index: int, entry: ParameterSlice, scale: float) -> Tensor | None:
        """Move a parameter's gradient into its bucket, times `scale`; 0 gives zeros for any values.

        Returns the scaled gradient, or None where there was none: that contributes zeros.
        """
        place, gradient = self.memory.place(index, entry), self.slots.pop(entry.spec.name)
        if gradient is not place:
            return copy_scaled(place, gradient, scale)
        rescale([place], scale)  # it has accumulated there
        return place

    def accumulate(self, index: int, entry: ParameterSlice) -> None:
        """Keep a parameter's gradient for the reduction that a later backward finishes. Local."""
        self.slots.hold(entry.spec.name, self.take(index, entry, 1.0))

    def own(self) -> list[Tensor]:
        """Return this rank's gradients of all buckets, taken and not launched. Views."""
        return [self.memory.flat(index) for index in range(len(self.memory.buckets))]

    def separate(self) -> None:
        """Set held means aside, and let the coming backward not add to what shows them."""
        self.set_aside()
        if self.slots.accumulate:
            self.slots.void()

    def set_aside(self) -> None:
        """Keep held means apart from a coming reduction, to whose result `finish` adds them."""
        if not self.held:
            return
        self.held = False
        for index, bucket in enumerate(self.memory.buckets):
            names = {entry.spec.name for entry in bucket.entries}
            gone = {name for name in names if not self.slots.keeps(name)}
            if gone == names:
                continue
            self._aside[index] = self.memory.kept(index).clone()
            low = self.memory.ranges[index][0]
            for piece in bucket.pieces(*self.memory.ranges[index]):
                if piece.spec.name in gone:
                    self._aside[index][piece.start - low : piece.stop - low].zero_()
            self._aside_names |= names - gone
        beside = sum(tensor.nbytes for tensor in self._aside.values())
        self.memory.note_peak(self.memory.nbytes + beside)

    @torch.no_grad()
    def finish(self, factor: float, unused: Collection[str], of_held: float = 1.0) -> None:
        """Wait for the sums, multiply them by a factor, and hold them.

        Means that were held before are added, times `of_held`. `parameter.grad` is published; it is
        None for names in `unused`.
        """
        self.memory.wait()
        self.scale_(factor)
        for index, mean in self._aside.items():
            self.memory.kept(index).add_(mean, alpha=of_held)
        self._aside.clear()
        for name, parameter in self.slots.parameters.items():
            if name in unused and name not in self._aside_names:
                parameter.grad = None
            else:
                self.slots.publish(name)
        self._aside_names.clear()
        self.held = True

    # Means.

    @torch.no_grad()
    def collect(self) -> frozenset[str]:
        """Take over what was done to `parameter.grad` since `finish`. Local.

        Returns the names of parameters whose `grad` is None. Raises RuntimeError for a gradient
        that was assigned at stages 1 and 2.
        """
        dropped = set()
        for index, bucket in enumerate(self.memory.buckets):
            for entry in bucket.entries:
                name = entry.spec.name
                if self.slots.keeps(name):
                    continue
                assigned = self.slots.adopt(name)
                if assigned is None:
                    dropped.add(name)
                    self._zero(index, name)
                else:
                    copy_scaled(self.memory.place(index, entry), assigned, 1.0)
                    self.slots.publish(name)
        return frozenset(dropped)

    def _zero(self, index: int, name: str) -> None:
        for piece in self.memory.buckets[index].pieces(*self.memory.ranges[index]):
            if piece.spec.name == name:
                self.reduced(index, piece).zero_()

    def reduced(self, index: int, piece: ParameterSlice) -> Tensor:
        """Return the mean of a slice that this rank keeps. Flat; a view."""
        start = piece.start - self.memory.ranges[index][0]
        return self.memory.kept(index)[start : start + piece.numel]

    def kept(self, index: int) -> list[Tensor]:
        """Return the means of a bucket that this rank keeps: one flat tensor. A view."""
        return [self.memory.kept(index)]

    def widened(self, index: int, factor: float) -> Tensor:
        """Return all that this rank keeps of a 16-bit bucket, in fp32 and times a factor. Flat.

        It may overwrite the mean.
        """
        return self.memory.widened(index, factor)

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiply the held means by a factor, after `collect`."""
        rescale([self.memory.kept(index) for index in range(len(self.memory.buckets))], factor)

    def clear(self, set_to_none: bool) -> None:
        """Discard all gradients: every `p.grad` becomes None, or stands for zeros if wanted."""
        self.memory.wait()
        self.forget()
        for name, parameter in self.slots.parameters.items():
            if set_to_none or self.slots.dropped(name):
                parameter.grad = None
            else:
                self.slots.publish(name)
        if not set_to_none:
            self.scale_(0)
            self.held = True

    def forget(self) -> None:
        """Forget what is kept, after every `p.grad` was dropped."""
        self._aside.clear()
        self._aside_names.clear()
        self.held = False
        self.memory.begin()


class LocalGradients:
    """The gradients of a single rank, which are the means already: nothing is copied.

    A scale of this rank's weight is not applied; a scale of 0 gives zeros. Shared memory of two
    gradients is separated, since both are multiplied in place.
    """

    def __init__(self) -> None:
        self.slots, self.memory, self.held = OwnSlots(), BucketMemory(), False
        self._aside: dict[str, Tensor] = {}  # means of earlier reductions, by parameter name
        self._addresses: dict[int, str] = {}  # of gradients in this reduction, with their names
        self._wide_bytes: dict[int, int] = {}  # of fp32 gradients, by bucket

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Hold the gradients of more buckets, of parameters by name."""
        self.memory.extend(buckets)
        for name, parameter in parameters.items():
            self.slots.add(name, parameter)
        self._note_peak()

    def begin(self) -> None:
        """Prepare for the first gradient of a reduction."""
        self._addresses.clear()

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
        if self._addresses.setdefault(own.data_ptr(), name) != name:
            own = own.clone()
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
        places = [(i, e) for i, bucket in enumerate(self.memory.buckets) for e in bucket.entries]
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
        names = [entry.spec.name for entry in self.memory.buckets[index].entries]
        return [g for name in names if (g := self.slots.parameters[name].grad) is not None]

    def widened(self, index: int, factor: float) -> Tensor:
        """Return the gradients of a bucket in fp32, in a new tensor; zeros where there is none."""
        bucket = self.memory.buckets[index]
        device = self.slots.parameters[bucket.entries[0].spec.name].device
        wide = torch.zeros(bucket.numel, dtype=torch.float32, device=device)
        for entry in bucket.entries:
            if not self.slots.dropped(entry.spec.name):
                pack(self.reduced(index, entry), factor, wide[entry.start : entry.stop])
        self._wide_bytes[index] = wide.nbytes
        self._note_peak()
        return wide

    def _note_peak(self) -> None:
        own = sum(bucket.nbytes for bucket in self.memory.buckets)
        self.memory.note_peak(own + sum(self._wide_bytes.values()))

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


def gradients_of(
    stage: int, collectives: Collectives, *, alone: bool
) -> BucketGradients | LocalGradients:
    """Return the gradients of a stage, or those of a single rank. Local."""
    if alone:
        return LocalGradients()
    if stage == 0:
        whole = WholeBuckets(collectives, None)
        return BucketGradients(VisibleSlots(whole.places), whole)
    memory = WholeBuckets if stage == 1 else BucketsInTurns
    own = collectives.slot(collectives.rank)
    return BucketGradients(RefusedSlots(stage), memory(collectives, own))
