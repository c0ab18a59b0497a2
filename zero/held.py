"""Gradients held for the whole step, one flat tensor a bucket: stages 0 and 1."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.gradients import Reduce, scaled
from zero.layout import Bucket, Entry
from zero.precision import needs_master, widened
from zero.views import nbytes, view


class Held:
    """Every `parameter.grad` is a view into its bucket's tensor.

    `sharded`: only this rank's shard of a reduced bucket is kept; else all of it.
    """

    def __init__(self, collectives: Collectives, reduce: Reduce, *, sharded: bool) -> None:
        self._collectives, self._reduce = collectives, reduce
        self._slot = collectives.slot(collectives.rank) if sharded else None
        self._parameters: dict[str, Parameter] = {}
        self._buckets: list[Bucket] = []
        self._flats: list[Tensor] = []
        self._rooms: list[Tensor] = []  # of which the flats are views
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
                self._install(len(self._buckets) - 1, entry)

    def arrive(self, index: int, entry: Entry) -> None:
        """See `Gradients.arrive`: backward has added it into its view, or replaced the view."""

    def has_stray(self, index: int, entry: Entry) -> bool:
        """See `Gradients.has_stray`."""
        gradient = self._parameters[entry.spec.name].grad
        return gradient is not None and bool(gradient.any())

    def launch(self, index: int, scale: float) -> Tensor:
        """See `Gradients.launch`."""
        flat = self._flats[index]
        for entry in self._buckets[index].entries:
            self._adopt(index, entry)
        taint = scaled(flat, scale)
        self._works.append(self._reduce(self._buckets[index], flat))
        return taint

    def finish(self) -> None:
        """See `Gradients.finish`."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def kept(self, index: int) -> Tensor:
        """See `Gradients.kept`: a view of the bucket."""
        return self._keep(self._buckets[index], self._flats[index])

    def widened(self, index: int) -> Tensor:
        """See `Gradients.widened`: in the bucket's own memory, if it is sharded."""
        kept = self.kept(index)
        if not needs_master(kept.dtype):
            return kept
        wide = widened(kept, self._rooms[index])
        if wide.data_ptr() != self._rooms[index].data_ptr():
            self._besides[index] = nbytes(wide)
            held = sum(map(nbytes, self._rooms)) + sum(self._besides.values())
            self.peak_kept = max(self.peak_kept, held)
        return wide

    def zero(self) -> None:
        """See `Gradients.zero`. The gradients stay, or become again, views."""
        self.finish()
        for index, bucket in enumerate(self._buckets):
            self._flats[index].zero_()
            for entry in bucket.entries:
                self._install(index, entry)

    def _keep(self, bucket: Bucket, flat: Tensor) -> Tensor:
        return flat if self._slot is None else flat[slice(*bucket.shard(self._slot))]

    def _install(self, index: int, entry: Entry) -> Tensor:
        parameter = self._parameters[entry.spec.name]
        parameter.grad = gradient = view(self._flats[index], entry.start, parameter)
        return gradient

    def _adopt(self, index: int, entry: Entry) -> None:
        """Bring a gradient back that someone else's `zero_grad` took out of its bucket."""
        gradient = self._parameters[entry.spec.name].grad
        mine = self._install(index, entry)
        if gradient is None:
            mine.zero_()
        elif gradient.is_sparse or gradient.data_ptr() != mine.data_ptr():
            mine.copy_(gradient.to_dense())


def held_numel(bucket: Bucket) -> int:
    """Elements that `Held` makes room for: so that half of a bucket fits when it is widened."""
    return bucket.numel + (bucket.numel % 2 if needs_master(bucket.dtype) else 0)


def held_bytes(bucket: Bucket, owned: int) -> int:
    """Bytes that `Held` takes for a bucket of which it keeps so many elements, at the worst."""
    room = held_numel(bucket) * bucket.dtype.itemsize
    wide = owned * torch.float32.itemsize if needs_master(bucket.dtype) else 0
    return room + (wide if wide > room else 0)
