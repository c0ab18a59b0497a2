"""Memory in which gradients are summed over ranks, and what `parameter.grad` is meanwhile.

A reduction of gradients is one backward, with those that `no_sync` left to it (stages 0 and 1), or
one micro-batch (stage 2). For each parameter, `take` moves its gradient into its bucket; then
`flat` and `launched` are called for the bucket. `finish` makes means of the sums. From then on the
means are held until `clear`, and further backward passes add to them:

    stage   parameter.grad when backward has returned     in a further backward
    0       the mean over ranks                           accumulates, and is reduced again
    1, 2    an `UnavailableGradient`                      `set_aside` keeps the means meanwhile

A parameter whose `grad` was set to None in between starts anew, as in torch.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.gradients.unavailable import UnavailableGradient
from zero.kernels import Kernels, rescale
from zero.layout import Bucket, ParameterSlice


class Gradients:
    """The gradients of this rank's parameters, summed over ranks: the common part of all stages.

    Between `finish` and `clear`, the means of what this rank keeps are `held`.
    """

    hides = True  # whether `take` hides a gradient from autograd and the user until `finish`

    def __init__(self, collectives: Collectives, stage: int) -> None:
        self._collectives, self._stage = collectives, stage
        self._slot = collectives.slot(collectives.rank) if stage else None
        self._parameters: dict[str, Parameter] = {}
        self._buckets: list[Bucket] = []
        self._unavailable: dict[str, UnavailableGradient] = {}  # by name; empty at stage 0
        self._aside: dict[int, Tensor] = {}  # kept means of earlier reductions, by bucket
        self._aside_names: set[str] = set()
        self.held = False
        self.peak_bytes = 0  # the most that gradients occupied outside of working tensors
        self.working_bytes = 0  # of working tensors

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate memory for more buckets, of parameters by name. Collective.

        A gradient that a parameter has counts as assigned.
        """
        self._buckets.extend(buckets)
        self._parameters.update(parameters)
        for name, parameter in parameters.items():
            if self._stage:
                self._unavailable[name] = UnavailableGradient(parameter, name, self._stage)

    def close(self, unfinished: Collection[str]) -> None:
        """Leave `parameter.grad` to others, who are refused what is no gradient of a whole batch.

        `unfinished` are the names of parameters with a gradient that was not reduced.
        """
        for name, parameter in self._parameters.items():
            left = self._unavailable.get(name)
            if parameter.grad is not None and name in unfinished:
                parameter.grad = left = UnavailableGradient(parameter, name, self._stage)
            if left is not None and left is parameter.grad:
                left.outlive()

    def take(self, index: int, entry: ParameterSlice, scale: float) -> Tensor | None:
        """Move a parameter's gradient into its bucket, times `scale`.

        A parameter without a gradient contributes zeros. A scale of 0 gives zeros for any values.
        Returns the scaled gradient, or None where there was none.
        """
        raise NotImplementedError

    def accumulate(self, index: int, entry: ParameterSlice) -> None:
        """Keep a parameter's gradient for the reduction that a later backward finishes. Local."""
        raise NotImplementedError

    def flat(self, index: int) -> Tensor:
        """Return the flat gradients of a bucket, of which every gradient was taken."""
        raise NotImplementedError

    def own(self) -> list[Tensor]:
        """Return this rank's gradients of all buckets, taken and not launched. Views."""
        return [self.flat(index) for index in range(len(self._buckets))]

    def launched(self, index: int, work: Work) -> None:
        """Record the reduction of a bucket, to which its flat gradients belong from now on."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for every reduction."""
        raise NotImplementedError

    def kept(self, index: int) -> Tensor:
        """Return the sums or means of a bucket that this rank keeps. Flat; a view.

        Elements of a parameter are in the order in which it lies in memory.
        """
        raise NotImplementedError

    def reduced(self, index: int, piece: ParameterSlice) -> Tensor:
        """Return the mean of a slice that this rank keeps. Flat; a view."""
        start = piece.start - self._range(index)[0]
        return self.kept(index)[start : start + piece.numel]

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """Return all that this rank keeps of a 16-bit bucket, in fp32 and times a factor. Flat."""
        raise NotImplementedError

    def begin(self) -> None:
        """Prepare for the first gradient of a reduction."""
        if self._stage:
            self.set_aside()

    def set_aside(self) -> None:
        """Keep held means apart from a coming reduction, to whose result `finish` adds them."""
        if not self.held:
            return
        self.held = False
        for index, bucket in enumerate(self._buckets):
            names = {entry.spec.name for entry in bucket.entries}
            gone = {name for name in names if not self.keeps(name)}
            if gone == names:
                continue
            self._aside[index] = self.kept(index).clone()
            low = self._range(index)[0]
            for piece in bucket.pieces(*self._range(index)):
                if piece.spec.name in gone:
                    self._aside[index][piece.start - low : piece.stop - low].zero_()
            self._aside_names |= names - gone
        if not self._stage:
            for parameter in self._parameters.values():
                parameter.grad = None
        aside = sum(tensor.nbytes for tensor in self._aside.values())
        self.peak_bytes = max(self.peak_bytes, self._bytes + aside)

    @torch.no_grad()
    def finish(self, factor: float, unused: Collection[str]) -> None:
        """Wait for the sums, multiply them by a factor, and hold them.

        `parameter.grad` becomes what the module's table says; None for names in `unused`.
        """
        self.wait()
        rescale([self.kept(index) for index in range(len(self._buckets))], factor)
        for index, mean in self._aside.items():
            self.kept(index).add_(mean)
        self._aside.clear()
        for name, parameter in self._parameters.items():
            absent = name in unused and name not in self._aside_names
            parameter.grad = None if absent else self._published(name)
        self._aside_names.clear()
        self.held = True

    @torch.no_grad()
    def collect(self) -> frozenset[str]:
        """Take over what was done to `parameter.grad` since `finish`. Local.

        Returns the names of parameters whose `grad` is None. Raises RuntimeError for a gradient
        that was assigned at stages 1 and 2.
        """
        places = [(i, e) for i, bucket in enumerate(self._buckets) for e in bucket.entries]
        return frozenset(e.spec.name for i, e in places if not self._adopt(i, e))

    def void(self) -> None:
        """Drop what `parameter.grad` holds of an earlier mean; other ranks hold it, too. Local."""

    def scale_(self, factor: float) -> None:
        """Multiply the held means by a factor, after `collect`."""
        rescale([self.kept(index) for index in range(len(self._buckets))], factor)

    def clear(self, set_to_none: bool) -> None:
        """Discard all gradients: every `p.grad` becomes None, or stands for zeros if wanted."""
        self.wait()
        self.forget()
        for name, parameter in self._parameters.items():
            absent = set_to_none or parameter.grad is None
            parameter.grad = None if absent else self._published(name)
        if not set_to_none:
            for index in range(len(self._buckets)):
                self.kept(index).zero_()
            self.held = True

    def forget(self) -> None:
        """Forget what is kept, after every `p.grad` was dropped."""
        for unavailable in self._unavailable.values():
            unavailable.arrived = None
        self._aside.clear()
        self._aside_names.clear()
        self.held = False

    @property
    def all_dropped(self) -> bool:
        """True if means are held, and every `p.grad` of them was dropped."""
        return self.held and not any(map(self.keeps, self._parameters))

    def keeps(self, name: str) -> bool:
        """Return whether a parameter's `grad` is still what this object has made of it."""
        return self._parameters[name].grad is self._unavailable[name]

    def dropped(self, name: str) -> bool:
        """Return whether a parameter's `grad` is None."""
        return self._parameters[name].grad is None

    @property
    def exist(self) -> bool:
        """True if any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self._parameters.values())

    def has_gradient(self, entry: ParameterSlice) -> bool:
        """Return whether a parameter has a gradient to take, which the user may have assigned."""
        gradient = self._parameters[entry.spec.name].grad
        unavailable = self._unavailable.get(entry.spec.name)
        if unavailable is not None and gradient is unavailable:
            return unavailable.arrived is not None
        return gradient is not None

    def pop(self, entry: ParameterSlice) -> Tensor:
        """Return the gradient that backward has just made, and hide it until `finish`."""
        gradient = self._pop(entry.spec.name)
        assert gradient is not None, "backward has just made it"
        return gradient

    def put(self, entry: ParameterSlice, gradient: Tensor) -> None:
        """Give a parameter a gradient to take, after `set_aside`; adds to one that it has."""
        name = entry.spec.name
        before = self._pop(name)
        gradient = gradient if before is None else before + gradient
        if self._stage:
            self._unavailable[name].arrived = gradient
        else:
            self._parameters[name].grad = gradient

    @property
    def _bytes(self) -> int:
        """Bytes of what this rank keeps."""
        raise NotImplementedError

    def _published(self, name: str) -> Tensor:
        """Return what the `grad` of a parameter is after a reduction."""
        return self._unavailable[name]

    def _range(self, index: int) -> tuple[int, int]:
        """Return the elements of a bucket that this rank keeps."""
        bucket = self._buckets[index]
        return (0, bucket.numel) if self._slot is None else bucket.shard(self._slot)

    def _pop(self, name: str) -> Tensor | None:
        """Return a parameter's gradient, and hide it until `finish`."""
        parameter, unavailable = self._parameters[name], self._unavailable.get(name)
        gradient, parameter.grad = parameter.grad, unavailable
        if unavailable is not None:
            arrived, unavailable.arrived = unavailable.arrived, None
            gradient = arrived if gradient is unavailable else gradient
        return gradient

    def _adopt(self, index: int, entry: ParameterSlice) -> bool:
        """Take over a parameter's `grad`; return False if it is None."""
        name = entry.spec.name
        gradient = self._parameters[name].grad
        if gradient is None:
            for piece in self._buckets[index].pieces(*self._range(index)):
                if piece.spec.name == name:
                    self.reduced(index, piece).zero_()
        elif gradient is not self._unavailable[name]:
            raise RuntimeError(
                f"a gradient of {name} was assigned after backward, but at stage {self._stage} "
                "each rank keeps a shard: assign it before backward, or use stage 0"
            )
        return gradient is not None
