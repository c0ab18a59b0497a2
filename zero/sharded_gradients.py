"""Working tensors through which gradients reach the ranks that own them: stage 2."""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.comm_hooks import ChainedWork, wait_all
from zero.gradients import copy_scaled, rescale
from zero.kernels import Kernels
from zero.layout import Bucket, BucketEntry, ParameterSlice
from zero.precision import is_16_bit
from zero.tensor_views import nbytes, view

IN_FLIGHT = 1  # buckets that are reduced while others are filled


class ShardedGradients:
    """Gradient shards, and a few working tensors in which all buckets take turns.

    A gradient is copied into its bucket's working tensor as it arrives, and `parameter.grad` is
    None again. When the reduction has finished, this rank's shard is added to the kept shard, and
    another bucket takes the working tensor. Backward waits while every working tensor is in flight.
    If all are being filled, because a bucket that is next in order lacks a gradient, one more is
    allocated. With one rank the shard is the whole bucket, and gradients are added to it directly.

    The sum of one micro-batch keeps its 16-bit dtype; several are summed in fp32.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._slot = collectives.slot(collectives.rank)
        self._parameters: dict[str, Parameter] = {}
        self._buckets: list[Bucket] = []
        self._shards: list[Tensor | None] = []  # kept, by bucket
        # Working tensors, of dtype uint8.
        self._filling: dict[int, Tensor] = {}
        self._in_flight: deque[tuple[int, Tensor, Work]] = deque()
        self._free: list[Tensor] = []
        self._usual_bytes = 0  # of a working tensor, other than that for oversized buckets
        self.peak_bytes = self.working_bytes = 0

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate working tensors anew, for all buckets."""
        self._parameters.update(parameters)
        self._buckets.extend(buckets)
        self._shards.extend(None for _ in buckets)
        device = next(iter(parameters.values())).device
        self._free, self.working_bytes = [], 0
        sizes = working_sizes(self._buckets, self._collectives.size)
        self._usual_bytes = sizes[0] if sizes else 0
        for size in sizes:
            self._add_working(self._collectives.allocate(size, torch.uint8, device))
        for parameter in parameters.values():
            parameter.grad = None

    def accumulate(self, index: int, entry: BucketEntry) -> None:
        """Raise: at stage 2 every micro-batch is reduced by itself."""
        raise AssertionError("every micro-batch is a round at stage 2")

    def take(self, index: int, entry: BucketEntry, scale: float) -> Tensor | None:
        """Move the gradient into its bucket's working tensor, scaled."""
        parameter = self._parameters[entry.spec.name]
        gradient, parameter.grad = parameter.grad, None
        if self._collectives.size == 1 and self._shards[index] is not None:
            return self._add_to_shard(index, entry, parameter, gradient, scale)
        slot = view(self._as_bucket(index, self._filling_tensor(index)), entry.start, parameter)
        if gradient is None:
            slot.zero_()
            return None
        copy_scaled(slot, gradient, scale)
        return slot

    def has_assigned(self, index: int, entry: BucketEntry) -> bool:
        """Return whether a parameter has a gradient."""
        return self._parameters[entry.spec.name].grad is not None

    def flat(self, index: int) -> Tensor:
        """Return a bucket's part of its working tensor; for one rank, the kept shard if any."""
        if self._collectives.size == 1 and index not in self._filling:
            return self._shard(index)
        return self._as_bucket(index, self._filling_tensor(index))

    def launched(self, index: int, work: Work) -> None:
        """Record the reduction; wait for older ones if they launch collectives while waited for.

        Those collectives must come at the same place in the order of launches on every rank.
        """
        if index in self._filling:
            self._in_flight.append((index, self._filling.pop(index), work))
        limit = 0 if self._collectives.size == 1 else IN_FLIGHT
        while len(self._in_flight) > limit and (limit == 0 or isinstance(work, ChainedWork)):
            self._finish_oldest()

    def finish(self) -> None:
        """Wait for every reduction."""
        wait_all([work for _, _, work in self._in_flight])
        while self._in_flight:
            self._finish_oldest()

    def reduced(self, index: int, piece: ParameterSlice) -> Tensor:
        """Return a slice of the kept shard."""
        start = piece.start - self._buckets[index].shard(self._slot)[0]
        return self._shard(index)[start : start + piece.numel]

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """Return the kept shard in fp32, which replaces a 16-bit one."""
        shard = self._shard(index)
        if is_16_bit(shard.dtype):
            self._shards[index] = wide = torch.empty_like(shard, dtype=torch.float32)
            kernels.pack(shard, factor, wide)
            self._note_peak()
            return wide
        rescale([shard], factor)  # the fp32 sum of several micro-batches
        return shard

    def clear(self, set_to_none: bool) -> None:
        """Discard the kept shards; every `p.grad` is None with either argument."""
        self.finish()
        if self._collectives.size > 1:
            self._free.extend(self._filling.values())
        else:  # fresh memory would cost page faults in every step
            reusable = [
                shard
                for shard, bucket in zip(self._shards, self._buckets, strict=True)
                if shard is not None and not is_16_bit(bucket.dtype)
            ]
            if reusable:
                self._free = [shard.view(torch.uint8) for shard in reusable]
        self._filling.clear()
        self._shards = [None for _ in self._buckets]
        for parameter in self._parameters.values():
            parameter.grad = None

    def _finish_oldest(self) -> None:
        """Wait for the oldest reduction, and add this rank's shard of it to the kept one."""
        index, working, work = self._in_flight.popleft()
        work.wait()
        shard = self._as_bucket(index, working)[slice(*self._buckets[index].shard(self._slot))]
        kept = self._shards[index]
        if kept is not None:
            self._shards[index] = self._wide_enough(kept).add_(shard)
        elif self._collectives.size == 1:
            self._shards[index] = shard  # all of the working tensor, which was made for it
        else:
            self._shards[index] = shard.clone()
        if self._collectives.size > 1:
            self._free.append(working)
        self._note_peak()

    @torch.no_grad()
    def _add_to_shard(
        self,
        index: int,
        entry: BucketEntry,
        parameter: Parameter,
        gradient: Tensor | None,
        scale: float,
    ) -> Tensor | None:
        """Add a gradient of a later micro-batch to the kept shard, with one rank."""
        if gradient is None:
            return None
        self._shards[index] = kept = self._wide_enough(self._shard(index))
        if scale != 1:
            scaled = torch.empty_like(parameter)
            copy_scaled(scaled, gradient, scale)
            gradient = scaled
        view(kept, entry.start, parameter).add_(gradient)
        self._note_peak()
        return gradient

    def _shard(self, index: int) -> Tensor:
        """Return the kept shard of a bucket; zeros if no rank had a micro-batch."""
        shard = self._shards[index]
        if shard is None:
            bucket = self._buckets[index]
            low, high = bucket.shard(self._slot)
            shard = torch.zeros(high - low, dtype=bucket.dtype, device=self._device(index))
            self._shards[index] = shard
        return shard

    def _filling_tensor(self, index: int) -> Tensor:
        """Return the working tensor that a bucket is filled into, a free one at first."""
        if index not in self._filling:
            self._filling[index] = self._working_tensor(index)
        return self._filling[index]

    def _working_tensor(self, index: int) -> Tensor:
        """Return a free working tensor for a bucket, of undefined content."""
        nbytes_needed = self._buckets[index].nbytes
        if self._collectives.size == 1:  # it becomes the kept shard
            for place, working in enumerate(self._free):
                if nbytes(working) == nbytes_needed:
                    return self._free.pop(place)
            return torch.empty(nbytes_needed, dtype=torch.uint8, device=self._device(index))
        oversized = nbytes_needed > self._usual_bytes
        while True:
            for place, working in enumerate(self._free):
                if (nbytes(working) > self._usual_bytes) == oversized:
                    return self._free.pop(place)
            if self._in_flight and not isinstance(self._in_flight[0][2], ChainedWork):
                self._finish_oldest()
                continue
            size = self._usual_bytes
            if oversized:
                size = working_sizes(self._buckets, self._collectives.size)[-1]
            # Not by `allocate`, which is collective: only this rank needs it.
            self._add_working(torch.empty(size, dtype=torch.uint8, device=self._device(index)))

    def _as_bucket(self, index: int, working: Tensor) -> Tensor:
        bucket = self._buckets[index]
        return working[: bucket.nbytes].view(bucket.dtype)

    def _add_working(self, working: Tensor) -> None:
        self._free.append(working)
        self.working_bytes += nbytes(working)

    def _device(self, index: int) -> torch.device:
        return self._parameters[self._buckets[index].entries[0].spec.name].device

    def _wide_enough(self, shard: Tensor) -> Tensor:
        """Return a shard in the dtype in which several micro-batches are summed."""
        return shard.float() if is_16_bit(shard.dtype) else shard

    def _note_peak(self) -> None:
        total = sum(nbytes(shard) for shard in self._shards if shard is not None)
        self.peak_bytes = max(self.peak_bytes, total)


def working_sizes(buckets: Sequence[Bucket], ranks: int) -> list[int]:
    """Return the bytes of each working tensor of `ShardedGradients`: equal ones, oversized last.

    Buckets of several dtypes may be filled at a time, so there is one working tensor for each
    dtype, and one in flight. Buckets more than twice as large as those would need share one of
    their own. One rank needs none.
    """
    if ranks == 1:
        return []
    sizes = sorted((bucket.nbytes for bucket in buckets), reverse=True)
    count = min(len(sizes), len({bucket.dtype for bucket in buckets}) + IN_FLIGHT)
    usual = next(size for size in sizes if size <= 2 * sizes[count - 1])
    oversized = [size for size in sizes if size > usual]
    return [usual] * min(count, len(sizes) - len(oversized)) + oversized[:1]
