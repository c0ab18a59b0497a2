"""Gradients that stay where backward made them: in a world of one, at every stage."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.gradients import put, rescale
from zero.kernels import Kernels
from zero.layout import Bucket, BucketEntry, ParameterSlice
from zero.precision import needs_master
from zero.tensor_views import lies_as, nbytes, run_of, view


class Alone:
    """Stages 0 and 1. There is nothing to sum, so nothing moves, and a step is that of plain torch.

    A gradient gets memory of its own only where it must: one that is sparse, that lies in another
    order than its parameter, or that shares memory with another parameter's (as when their sum
    was taken), since what is scaled in place would be scaled twice.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, Parameter] = {}
        self._buckets: list[Bucket] = []
        # Of this step: those whose memory a gradient lies in, by its address; and the gradients.
        self._holders: dict[int, Parameter] = {}
        self._taken: dict[str, Tensor] = {}
        self._besides: dict[int, int] = {}  # bytes of fp32 gradients, by bucket
        self.peak_kept = self.working = 0

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """See `Gradients.add`."""
        self._parameters.update(parameters)
        self._buckets.extend(buckets)
        for parameter in parameters.values():
            parameter.grad = None

    def hold(self, index: int, entry: BucketEntry) -> None:
        """See `Gradients.hold`."""
        self._settle(entry, 1.0)

    def take(self, index: int, entry: BucketEntry, scale: float) -> Tensor | None:
        """See `Gradients.take`."""
        there = self._parameters[entry.spec.name].grad is not None
        self._taken[entry.spec.name] = gradient = self._settle(entry, scale)
        return gradient if there else None

    def has_stray(self, index: int, entry: BucketEntry) -> bool:
        """See `Gradients.has_stray`."""
        gradient = self._parameters[entry.spec.name].grad
        return gradient is not None and bool(gradient.any())

    def launch(self, index: int) -> None:
        """See `Gradients.launch`: nothing to do."""

    def finish(self) -> None:
        """See `Gradients.finish`: nothing to wait for."""
        self._note_peak()

    def part(self, index: int, piece: ParameterSlice) -> Tensor:
        """See `Gradients.part`."""
        return run_of(self._taken[piece.spec.name])

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """See `Gradients.widened`: in new memory."""
        wide = self._packed(index, factor, kernels)
        self._besides[index] = nbytes(wide)
        self._note_peak()
        return wide

    def _packed(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """The gradients of a bucket in a new fp32 tensor, times a factor."""
        bucket = self._buckets[index]
        device = self._parameters[bucket.entries[0].spec.name].device
        wide = torch.empty(bucket.numel, dtype=torch.float32, device=device)
        for piece in bucket.pieces(0, bucket.numel):
            there = wide[piece.start : piece.start + piece.numel]
            kernels.pack(self.part(index, piece), factor, there)
        return wide

    def release(self) -> None:
        """See `Gradients.release`. From now on only the parameters keep them."""
        self._holders.clear()
        self._taken.clear()

    def zero(self, set_to_none: bool) -> None:
        """See `Gradients.zero`."""
        self.release()
        for parameter in self._parameters.values():
            parameter.grad = None if set_to_none else self._room(parameter).zero_()

    def _settle(self, entry: BucketEntry, scale: float) -> Tensor:
        """A parameter's gradient, times a scale, in memory of its own; zeros where it has none."""
        parameter = self._parameters[entry.spec.name]
        gradient = parameter.grad
        if gradient is not None and self._is_its_own(parameter, gradient):
            rescale(gradient, scale)
            return gradient
        parameter.grad = mine = self._room(parameter)
        if gradient is None:
            mine.zero_()
        else:
            put(mine, gradient, scale)
        return mine

    def _is_its_own(self, parameter: Parameter, gradient: Tensor) -> bool:
        """Whether a gradient lies as its parameter does, in memory that no other gradient has."""
        if gradient.is_sparse or gradient.requires_grad or gradient.dtype != parameter.dtype:
            return False
        if not lies_as(gradient, parameter):
            return False
        return not self._is_taken(_address(gradient), parameter)

    def _is_taken(self, address: int, parameter: Parameter) -> bool:
        """Whether another parameter has a gradient there; else it is this one's from now on."""
        other = self._holders.setdefault(address, parameter)
        if other is parameter:
            return False
        theirs = other.grad
        if theirs is not None and _address(theirs) == address:
            return True
        self._holders[address] = parameter
        return False

    def _note_peak(self) -> None:
        held = sum(map(nbytes, self._taken.values())) + sum(self._besides.values())
        self.peak_kept = max(self.peak_kept, held)

    def _room(self, parameter: Parameter) -> Tensor:
        flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        return view(flat, 0, parameter)


class AloneByRound(Alone):
    """Stage 2, where every micro-batch is a round: each takes the gradients off their parameters.

    The first one's are kept as they came; what others bring is added, of 16 bits in fp32.
    """

    def hold(self, index: int, entry: BucketEntry) -> None:
        """See `Gradients.hold`."""
        raise AssertionError("here every micro-batch is a round: nothing is held for another")

    def take(self, index: int, entry: BucketEntry, scale: float) -> Tensor | None:
        """See `Gradients.take`."""
        name = entry.spec.name
        parameter = self._parameters[name]
        if parameter.grad is None:
            return None
        gradient = self._settle(entry, scale)
        parameter.grad = None
        kept = self._taken.get(name)
        if kept is None:
            self._taken[name] = gradient
            self._holders[_address(gradient)] = parameter
        elif needs_master(kept.dtype):
            del self._holders[_address(kept)]
            self._taken[name] = kept.float().add_(gradient)
        else:
            kept.add_(gradient)
        return gradient

    def has_stray(self, index: int, entry: BucketEntry) -> bool:
        """See `Gradients.has_stray`."""
        return self._parameters[entry.spec.name].grad is not None

    def finish(self) -> None:
        """See `Gradients.finish`. What no micro-batch brought is zeros."""
        for name, parameter in self._parameters.items():
            if name not in self._taken:
                self._taken[name] = self._room(parameter).zero_()
        self._note_peak()

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """See `Gradients.widened`: in new memory, and the old is given back."""
        wide = self._packed(index, factor, kernels)
        for piece in self._buckets[index].pieces(0, wide.numel()):
            self._taken[piece.spec.name] = wide[piece.start : piece.start + piece.numel]
        self._note_peak()
        return wide

    def zero(self, set_to_none: bool) -> None:
        """See `Gradients.zero`. Parameters have none, whatever the argument."""
        super().zero(set_to_none=True)

    def _is_taken(self, address: int, parameter: Parameter) -> bool:
        return address in self._holders


def _address(gradient: Tensor) -> int:
    return gradient.untyped_storage().data_ptr()


def alone_bytes(bucket: Bucket) -> int:
    """Bytes that `Alone` takes for a bucket, at the worst."""
    wide = torch.float32.itemsize if needs_master(bucket.dtype) else 0
    return bucket.nbytes + bucket.numel * wide
