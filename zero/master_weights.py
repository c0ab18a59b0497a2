"""What this rank updates: pieces of parameters, and fp32 masters of those that are 16 bits wide."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.gradients import Gradients, rescale_all
from zero.kernels import Kernels
from zero.layout import Bucket, ParameterSlice
from zero.precision import needs_master
from zero.tensor_views import flattened, nbytes, view

ParamGroup = dict[str, Any]


@dataclass(frozen=True)
class OwnedSlice:
    """A piece that this rank owns, as the torch optimizer sees it."""

    piece: ParameterSlice
    index: int  # of its bucket
    offset: int  # where it starts in what this rank owns of the bucket
    parameter: Parameter
    home: Tensor  # the piece in the parameter's memory
    tensor: Tensor  # what is updated: the same memory, or its fp32 master

    @property
    def has_master(self) -> bool:
        """Whether the update is made on a master copy."""
        return self.tensor.dtype != self.home.dtype

    def in_memory_of(self, flat: Tensor) -> Tensor:
        """This piece of a flat tensor that holds what this rank owns of the bucket. A view."""
        return self.in_shape(flat[self.offset : self.offset + self.piece.numel])

    def in_shape(self, flat: Tensor) -> Tensor:
        """A flat tensor of the piece's elements, shaped and ordered as the piece. A view."""
        return view(flat, 0, self.parameter) if self.piece.whole else flat

    def flattened(self, tensor: Tensor) -> Tensor:
        """A tensor shaped as the piece, flat: a view where it lies in memory as the piece does."""
        if not self.piece.whole or (tensor.is_contiguous() and self.parameter.is_contiguous()):
            return tensor.reshape(-1)
        return flattened(tensor, self.parameter)


class OptimizerShard:
    """The pieces that this rank owns, by bucket, and what the torch optimizer is to see of them.

    A parameter that is owned whole keeps its shape, and is itself what is updated unless it needs a
    master; what is cut is one-dimensional. Masters are fp32, and exist for owned pieces only.
    """

    def __init__(self) -> None:
        self.pieces: list[OwnedSlice] = []
        self._before: list[Tensor | None] = []  # the gradients that `feed` took the place of
        self.masters: list[Tensor] = []  # flat, by bucket where there is one
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

        `flat` is the bucket's parameters in one tensor, needed where pieces may be cut.
        """
        start, stop = part
        self.device = parameters[bucket.entries[0].spec.name].device
        master = None
        if needs_master(bucket.dtype):
            master = torch.empty(stop - start, dtype=torch.float32, device=self.device)
            self.masters.append(master)
        for piece in bucket.pieces(start, stop):
            parameter = parameters[piece.spec.name]
            home: Tensor = parameter
            if not piece.whole:
                assert flat is not None, "what is not flat is owned whole"
                home = flat[piece.start : piece.start + piece.numel]
            owned = OwnedSlice(piece, index, piece.start - start, parameter, home, home)
            if master is not None:
                owned = replace(owned, tensor=owned.in_memory_of(master))
            self.pieces.append(owned)
        self.refresh()

    def groups(self, groups: Iterable[ParamGroup]) -> list[ParamGroup]:
        """The groups of parameters as groups of what this rank updates of them."""
        by_parameter: dict[Parameter, list[Tensor]] = {}
        for owned in self.pieces:
            by_parameter.setdefault(owned.parameter, []).append(owned.tensor)
        return [
            {**group, "params": [t for p in group["params"] for t in by_parameter.get(p, [])]}
            for group in groups
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the masters from the parameters."""
        for owned in self.pieces:
            if owned.has_master:
                owned.tensor.copy_(owned.home)

    @torch.no_grad()
    def heed(self) -> None:
        """Take into the masters what somebody has written into the parameters since `write_back`.

        Weights that were loaded or clamped, say. Waits for the device, if there are masters.
        """
        with_master = [owned for owned in self.pieces if owned.has_master]
        written = [o.home != o.tensor.to(o.home.dtype) for o in with_master]
        if written and bool(torch.stack([where.any() for where in written]).any()):
            for owned, where in zip(with_master, written, strict=True):
                owned.tensor.copy_(torch.where(where, owned.home.float(), owned.tensor))

    @torch.no_grad()
    def feed(
        self, gradients: Gradients, factor: float, unused: Collection[str], kernels: Kernels
    ) -> None:
        """Give every piece its gradient: its sum times `factor`, in place, and in fp32 or wider.

        Pieces of parameters in `unused` get none, so that the torch optimizer leaves them alone.
        """
        wide: dict[int, Tensor] = {}
        parts = []
        self._before = [owned.tensor.grad for owned in self.pieces]
        for owned in self.pieces:
            if not owned.has_master:
                part = gradients.part(owned.index, owned.piece)
                parts.append(part)
            else:
                if owned.index not in wide:
                    wide[owned.index] = gradients.widened(owned.index, factor, kernels)
                part = wide[owned.index][owned.offset : owned.offset + owned.piece.numel]
            owned.tensor.grad = None if owned.piece.spec.name in unused else owned.in_shape(part)
        rescale_all(parts, factor)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the parameters, and take the gradients back that were fed."""
        for owned, before in zip(self.pieces, self._before, strict=True):
            if owned.has_master:
                owned.home.copy_(owned.tensor)
            owned.tensor.grad = before
        self._before.clear()

    @property
    def master_bytes(self) -> int:
        """Bytes of all masters."""
        return sum(nbytes(master) for master in self.masters)
