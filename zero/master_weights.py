"""The slices of parameters that this rank updates, and their fp32 master weights."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.gradients import Gradients, rescale
from zero.kernels import Kernels
from zero.layout import Bucket, ParameterSlice
from zero.precision import is_16_bit, master_dtype, narrower
from zero.tensor_views import flattened, nbytes, view

ParamGroup = dict[str, Any]


@dataclass(frozen=True)
class OwnedSlice:
    """A slice of a parameter that this rank updates, as the torch optimizer sees it."""

    piece: ParameterSlice
    index: int  # of its bucket
    offset: int  # of its first element in the owned part of the bucket
    parameter: Parameter
    home: Tensor  # the slice in the parameter's memory
    tensor: Tensor  # what the torch optimizer updates: `home`, or its master weights
    published: torch.dtype  # to which master weights are rounded in `home`

    @property
    def has_master(self) -> bool:
        """Whether there are master weights."""
        return self.tensor is not self.home

    def rounded(self) -> Tensor:
        """Return the values that master weights have in the parameter."""
        return self.tensor.to(self.published).to(self.home.dtype)

    def in_shape(self, flat: Tensor) -> Tensor:
        """Return a view of a flat tensor of the slice's elements, in the slice's shape."""
        return view(flat, 0, self.parameter) if self.piece.whole else flat

    def flattened(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the slice's shape as a flat one: a view, or a copy if needed."""
        if not self.piece.whole or (tensor.is_contiguous() and self.parameter.is_contiguous()):
            return tensor.reshape(-1)
        return flattened(tensor, self.parameter)


class OptimizerShard:
    """The parameter slices that this rank owns, in the order of buckets, with master weights.

    A parameter that is owned whole keeps its shape, and is updated itself unless it has master
    weights; a slice of one is flat. Parameters of 16 bits have fp32 master weights, and so have
    those that travel in a narrower `gather_dtype`, since they are rounded after an update.
    """

    def __init__(self, gather_dtype: torch.dtype | None) -> None:
        self._gather_dtype = gather_dtype
        self.pieces: list[OwnedSlice] = []
        self._user_gradients: list[Tensor | None] = []  # which `set_gradients` replaced
        self._masters: list[Tensor] = []  # flat, of buckets
        self.device = torch.device("cpu")  # of the parameters

    def add(
        self,
        index: int,
        bucket: Bucket,
        part: tuple[int, int],
        parameters: Mapping[str, Parameter],
        flat: Tensor | None,
    ) -> None:
        """Own the elements `part` (from, to) of a bucket.

        `flat` is the memory of the bucket's parameters; None where they are owned whole.
        """
        start, stop = part
        self.device = parameters[bucket.entries[0].spec.name].device
        master = None
        if dtype := master_dtype(bucket.dtype, self._gather_dtype):
            master = torch.empty(stop - start, dtype=dtype, device=self.device)
            self._masters.append(master)
        published = narrower(self._gather_dtype, bucket.dtype) or bucket.dtype
        for piece in bucket.pieces(start, stop):
            parameter = parameters[piece.spec.name]
            home: Tensor = parameter
            if not piece.whole:
                assert flat is not None, "parameters that are not flat are owned whole"
                home = flat[piece.start : piece.start + piece.numel]
            offset = piece.start - start
            owned = OwnedSlice(piece, index, offset, parameter, home, home, published)
            if master is not None:
                tensor = owned.in_shape(master[offset : offset + piece.numel])
                owned = replace(owned, tensor=tensor)
            self.pieces.append(owned)
        self.copy_from_parameters()

    def groups(self, groups: Iterable[ParamGroup]) -> list[ParamGroup]:
        """Return groups of parameters as groups of the tensors that this rank updates."""
        by_parameter: dict[Parameter, list[Tensor]] = {}
        for owned in self.pieces:
            by_parameter.setdefault(owned.parameter, []).append(owned.tensor)
        return [
            {**group, "params": [t for p in group["params"] for t in by_parameter.get(p, [])]}
            for group in groups
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the torch optimizer updates."""
        return [owned.tensor for owned in self.pieces]

    def reduced(self, gradients: Gradients) -> Iterable[tuple[str, Tensor]]:
        """Yield the sum over ranks of each slice's gradient, with its parameter's name."""
        for owned in self.pieces:
            yield owned.piece.spec.name, gradients.reduced(owned.index, owned.piece)

    @torch.no_grad()
    def copy_from_parameters(self) -> None:
        """Overwrite the master weights with the parameters."""
        for owned in self._with_master():
            owned.tensor.copy_(owned.home)

    @torch.no_grad()
    def sync_from_parameters(self) -> None:
        """Copy parameters that were changed since `copy_to_parameters` to the master weights.

        Loaded or clamped weights, say. Waits for the device, if there are master weights.
        """
        with_master = self._with_master()
        changed = [owned.home != owned.rounded() for owned in with_master]
        if changed and bool(torch.stack([mask.any() for mask in changed]).any()):
            for owned, mask in zip(with_master, changed, strict=True):
                wide = owned.home.to(owned.tensor.dtype)
                owned.tensor.copy_(torch.where(mask, wide, owned.tensor))

    @torch.no_grad()
    def set_gradients(
        self, gradients: Gradients, factor: float, unused: Collection[str], kernels: Kernels
    ) -> None:
        """Point the `grad` of every tensor at its sum times `factor`, in fp32 or wider.

        Slices of parameters in `unused` get None, so that the torch optimizer skips them.
        """
        wide: dict[int, Tensor] = {}
        in_place = []
        self._user_gradients = [owned.tensor.grad for owned in self.pieces]
        for owned in self.pieces:
            if is_16_bit(owned.piece.spec.dtype):
                if owned.index not in wide:
                    wide[owned.index] = gradients.widened(owned.index, factor, kernels)
                part = wide[owned.index][owned.offset : owned.offset + owned.piece.numel]
            else:
                part = gradients.reduced(owned.index, owned.piece)
                in_place.append(part)
            owned.tensor.grad = None if owned.piece.spec.name in unused else owned.in_shape(part)
        rescale(in_place, factor)

    @torch.no_grad()
    def restore_gradients(self) -> None:
        """Undo what `set_gradients` did to `grad`."""
        for owned, gradient in zip(self.pieces, self._user_gradients, strict=True):
            owned.tensor.grad = gradient
        self._user_gradients.clear()

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Round the master weights into the parameters."""
        for owned in self._with_master():
            owned.home.copy_(
                owned.rounded() if owned.published != owned.home.dtype else owned.tensor
            )

    @property
    def master_bytes(self) -> int:
        """Bytes of all master weights."""
        return sum(map(nbytes, self._masters))

    def _with_master(self) -> list[OwnedSlice]:
        return [owned for owned in self.pieces if owned.has_master]
