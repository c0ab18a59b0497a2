"""Gradients that pass through working tensors to their owners: stage 2."""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.gradients import Reduce, put, rescale
from zero.kernels import Kernels
from zero.layout import Bucket, BucketEntry, ParameterSlice
from zero.precision import needs_master
from zero.tensor_views import nbytes, view

# Working tensors besides one for every dtype: one is filled while another is reduced.
IN_FLIGHT = 1


class ShardedGradients:
    """A few working tensors, which all buckets take turns in; only this rank's shards stay.

    A gradient is copied into its bucket's working tensor as it arrives, and `parameter.grad` is
    None again. With the reduction over, this rank's shard is added to what it keeps, and another
    bucket takes the working tensor. Backward waits when all are in flight. When all are being
    filled, as happens where parameters without a gradient hold up the order, one more is made.

    Of one micro-batch the 16-bit sum is kept as it came; of several, the sum of sums in fp32.
    """

    def __init__(self, collectives: Collectives, reduce: Reduce) -> None:
        self._collectives, self._reduce = collectives, reduce
        self._slot = collectives.slot(collectives.rank)
        self._parameters: dict[str, Parameter] = {}
        self._buckets: list[Bucket] = []
        self._kept: list[Tensor | None] = []
        # Working tensors, as bytes: being filled, with what to wait for, or free.
        self._filling: dict[int, Tensor] = {}
        self._flying: deque[tuple[int, Tensor, Work]] = deque()
        self._free: list[Tensor] = []
        self._usual = 0  # bytes of a working tensor, but that for a giant
        self.peak_kept = self.working = 0

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """See `Gradients.add`."""
        self._parameters.update(parameters)
        self._buckets.extend(buckets)
        self._kept.extend(None for _ in buckets)
        device = next(iter(parameters.values())).device
        self._free, self.working = [], 0
        for size in working_bytes(self._buckets):
            self._add_room(self._collectives.allocate(size, torch.uint8, device))
        self._usual = nbytes(self._free[0])
        for parameter in parameters.values():
            parameter.grad = None

    def hold(self, index: int, entry: BucketEntry) -> None:
        """See `Gradients.hold`."""
        raise AssertionError("here every micro-batch is a round: nothing is held for another")

    def take(self, index: int, entry: BucketEntry, scale: float) -> Tensor | None:
        """See `Gradients.take`."""
        parameter = self._parameters[entry.spec.name]
        flat = self._filled(index)
        if parameter.grad is None:
            flat[entry.start : entry.stop].zero_()
            return None
        mine = view(flat, entry.start, parameter)
        put(mine, parameter.grad, scale)
        parameter.grad = None
        return mine

    def has_stray(self, index: int, entry: BucketEntry) -> bool:
        """See `Gradients.has_stray`."""
        return self._parameters[entry.spec.name].grad is not None

    def launch(self, index: int) -> None:
        """See `Gradients.launch`."""
        flat = self._filled(index)
        room = self._filling.pop(index)
        self._flying.append((index, room, self._reduce(self._buckets[index], flat)))

    def finish(self) -> None:
        """See `Gradients.finish`."""
        while self._flying:
            self._land()

    def part(self, index: int, piece: ParameterSlice) -> Tensor:
        """See `Gradients.part`."""
        start = piece.start - self._buckets[index].shard(self._slot)[0]
        return self._shard(index)[start : start + piece.numel]

    def _shard(self, index: int) -> Tensor:
        """This rank's shard of a bucket, in memory of its own."""
        kept = self._kept[index]
        if kept is None:  # no rank had a micro-batch
            low, high = self._buckets[index].shard(self._slot)
            device = self._free[0].device
            kept = torch.zeros(high - low, dtype=self._buckets[index].dtype, device=device)
            self._kept[index] = kept
        return kept

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """See `Gradients.widened`."""
        kept = self._shard(index)
        if needs_master(kept.dtype):
            self._kept[index] = wide = torch.empty_like(kept, dtype=torch.float32)
            kernels.pack(kept, factor, wide)
            self._note_peak()
            return wide
        rescale(kept, factor)  # of several micro-batches it is wide already
        return kept

    def release(self) -> None:
        """See `Gradients.release`."""

    def zero(self, set_to_none: bool) -> None:
        """See `Gradients.zero`. Gives the memory back, whatever the argument."""
        self.finish()
        self._free.extend(self._filling.values())
        self._filling.clear()
        self._kept = [None for _ in self._buckets]
        for parameter in self._parameters.values():
            parameter.grad = None

    def _land(self) -> None:
        """Wait for the oldest reduction, and keep this rank's shard of it."""
        index, room, work = self._flying.popleft()
        work.wait()
        shard = self._flat(index, room)[slice(*self._buckets[index].shard(self._slot))]
        kept = self._kept[index]
        if kept is None:
            self._kept[index] = shard.clone()
        else:
            self._kept[index] = (kept.float() if needs_master(kept.dtype) else kept).add_(shard)
        self._note_peak()
        self._free.append(room)

    def _room_for(self, index: int) -> Tensor:
        """A working tensor for a bucket; its content is undefined."""
        bucket = self._buckets[index]
        giant = bucket.nbytes > self._usual
        while not (fitting := [r for r in self._free if (nbytes(r) > self._usual) == giant]):
            if self._flying:
                self._land()
            else:
                device = self._parameters[bucket.entries[0].spec.name].device
                size = working_bytes(self._buckets)[-1] if giant else self._usual
                # This rank alone needs it: no memory that all ranks would have to make at once.
                self._add_room(torch.empty(size, dtype=torch.uint8, device=device))
        room = fitting[0]
        self._free = [other for other in self._free if other is not room]
        return room

    def _filled(self, index: int) -> Tensor:
        """What a bucket is filled into: the working tensor that it has, or gets now."""
        if index not in self._filling:
            self._filling[index] = self._room_for(index)
        return self._flat(index, self._filling[index])

    def _flat(self, index: int, room: Tensor) -> Tensor:
        bucket = self._buckets[index]
        return room[: bucket.nbytes].view(bucket.dtype)

    def _add_room(self, room: Tensor) -> None:
        self._free.append(room)
        self.working += nbytes(room)

    def _note_peak(self) -> None:
        held = sum(nbytes(kept) for kept in self._kept if kept is not None)
        self.peak_kept = max(self.peak_kept, held)


def working_bytes(buckets: Sequence[Bucket]) -> list[int]:
    """Sizes of the working tensors of `ShardedGradients`: all alike, and last one for giants, if any.

    Buckets of several dtypes fill at a time, so there is one for each, and one in flight besides. A
    giant is a bucket more than twice as large as would fill those.
    """
    sizes = sorted((bucket.nbytes for bucket in buckets), reverse=True)
    count = min(len(sizes), len({bucket.dtype for bucket in buckets}) + IN_FLIGHT)
    usual = next(size for size in sizes if size <= 2 * sizes[count - 1])
    giants = [size for size in sizes if size > usual]
    return [usual] * min(count, len(sizes) - len(giants)) + giants[:1]
