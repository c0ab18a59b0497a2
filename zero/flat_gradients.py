"""Gradients held for the whole step, one flat tensor a bucket: stages 0 and 1."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.gradients import Reduce, put, rescale
from zero.kernels import Kernels
from zero.layout import Bucket, BucketEntry, ParameterSlice
from zero.precision import needs_master, widened
from zero.tensor_views import nbytes, view


class FlatGradients:
    """Every `parameter.grad` becomes a view into its bucket's tensor when backward has made it.

    A step begins without gradients. So backward hands its own tensor over, which is copied into the
    bucket and scaled on the way, in one pass; zeroing first and adding would be three. What
    further micro-batches bring is added in place. `sharded`: only this rank's shard of a reduced
    bucket is kept; else all of it.
    """

    def __init__(self, collectives: Collectives, reduce: Reduce, *, sharded: bool) -> None:
        self._collectives, self._reduce = collectives, reduce
        self._slot = collectives.slot(collectives.rank) if sharded else None
        self._parameters: dict[str, Parameter] = {}
        self._buckets: list[Bucket] = []
        self._flats: list[Tensor] = []
        self._rooms: list[Tensor] = []  # of which the flats are views
        self._views: dict[str, Tensor] = {}  # the gradients, by parameter
        self._besides: dict[int, int] = {}  # bytes of fp32 gradients outside of their buckets
        self._works: list[Work] = []
        self.peak_kept = self.working = 0

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """See `Gradients.add`."""
        self._parameters.update(parameters)
        for bucket in buckets:
            device = parameters[bucket.entries[0].spec.name].device
            room = self._collectives.allocate(held_numel(bucket), bucket.dtype, device)
            flat = room[: bucket.numel]
            self._buckets.append(bucket)
            self._flats.append(flat)
            self._rooms.append(room)
            self.peak_kept += nbytes(room)
            for entry in bucket.entries:
                parameter = parameters[entry.spec.name]
                self._views[entry.spec.name] = view(flat, entry.start, parameter)
                parameter.grad = None

    def hold(self, index: int, entry: BucketEntry) -> None:
        """See `Gradients.hold`."""
        self.take(index, entry, 1.0)

    def take(self, index: int, entry: BucketEntry, scale: float) -> Tensor | None:
        """See `Gradients.take`. Also brings back what someone else's `zero_grad` took out."""
        parameter, mine = self._parameters[entry.spec.name], self._views[entry.spec.name]
        gradient = parameter.grad
        if gradient is mine:
            rescale(mine, scale)
            return mine
        parameter.grad = mine
        if gradient is None:
            mine.zero_()
            return None
        put(mine, gradient, scale)
        return mine

    def has_stray(self, index: int, entry: BucketEntry) -> bool:
        """See `Gradients.has_stray`."""
        gradient = self._parameters[entry.spec.name].grad
        return gradient is not None and bool(gradient.any())

    def launch(self, index: int) -> None:
        """See `Gradients.launch`."""
        self._works.append(self._reduce(self._buckets[index], self._flats[index]))

    def finish(self) -> None:
        """See `Gradients.finish`."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def part(self, index: int, piece: ParameterSlice) -> Tensor:
        """See `Gradients.part`."""
        return self._flats[index][piece.start : piece.start + piece.numel]

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """See `Gradients.widened`: in the bucket's own memory, if it is sharded."""
        flat, bucket = self._flats[index], self._buckets[index]
        kept = flat if self._slot is None else flat[slice(*bucket.shard(self._slot))]
        wide = widened(kept, factor, self._rooms[index], kernels)
        if wide.data_ptr() != self._rooms[index].data_ptr():
            self._besides[index] = nbytes(wide)
            held = sum(map(nbytes, self._rooms)) + sum(self._besides.values())
            self.peak_kept = max(self.peak_kept, held)
        return wide

    def release(self) -> None:
        """See `Gradients.release`."""

    def zero(self, set_to_none: bool) -> None:
        """See `Gradients.zero`."""
        self.finish()
        for name, parameter in self._parameters.items():
            parameter.grad = None if set_to_none else self._views[name]
        for flat in () if set_to_none else self._flats:
            flat.zero_()


def held_numel(bucket: Bucket) -> int:
    """Elements that `FlatGradients` makes room for: so that half of a bucket fits when it is widened."""
    return bucket.numel + (bucket.numel % 2 if needs_master(bucket.dtype) else 0)


def held_bytes(bucket: Bucket, owned: int) -> int:
    """Bytes that `FlatGradients` takes for a bucket of which it keeps so many elements, at the worst."""
    room = held_numel(bucket) * bucket.dtype.itemsize
    wide = owned * torch.float32.itemsize if needs_master(bucket.dtype) else 0
    return room + (wide if wide > room else 0)
