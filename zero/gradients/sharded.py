"""Gradient shards of stage 2."""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.comm_hooks import ChainedWork, wait_all
from zero.gradients.sums import Gradients
from zero.kernels import Kernels, copy_scaled, rescale, sum_dtype, view
from zero.layout import Bucket, ParameterSlice
from zero.precision import is_16_bit

IN_FLIGHT = 1  # buckets that are reduced while others are filled


class ShardedGradients(Gradients):
    """Gradient shards for stage 2, and a few working tensors in which all buckets take turns.

    A gradient is copied into its bucket's working tensor as it arrives. When the reduction has
    finished, this rank's shard is added to the kept shard, and another bucket takes the working
    tensor. Backward waits while every working tensor is in flight. If all are being filled, because
    a bucket that is next in order lacks a gradient, one more is allocated.

    The sum of one micro-batch keeps its 16-bit dtype; several are summed in fp32.
    """

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives, stage=2)
        self._shards: list[Tensor | None] = []  # kept, by bucket
        # Working tensors, of dtype uint8.
        self._filling: dict[int, Tensor] = {}
        self._in_flight: deque[tuple[int, Tensor, Work]] = deque()
        self._free: list[Tensor] = []
        self._sizes: list[int] = []  # as `working_sizes` returns them
        self._device = torch.device("cpu")  # of all parameters

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate working tensors anew, for all buckets. Collective."""
        super().add(buckets, parameters)
        self._shards.extend(None for _ in buckets)
        self._free, self.working_bytes = [], 0
        self._sizes = working_sizes(self._buckets)
        self._device = next(iter(parameters.values())).device
        for size in self._sizes:
            self._add_working(self._collectives.allocate(size, torch.uint8, self._device))

    def take(self, index: int, entry: ParameterSlice, scale: float) -> Tensor | None:
        """Copy the gradient into its bucket's working tensor."""
        name = entry.spec.name
        slot = view(self._filled(index), entry.start, self._parameters[name])
        return copy_scaled(slot, self._pop(name), scale)

    def flat(self, index: int) -> Tensor:
        """Return the bucket's part of its working tensor."""
        return self._filled(index)

    def launched(self, index: int, work: Work) -> None:
        """Record the reduction; wait for older ones if they launch collectives while waited for.

        Those collectives must come at the same place in the order of launches on every rank.
        """
        self._in_flight.append((index, self._filling.pop(index), work))
        while isinstance(work, ChainedWork) and len(self._in_flight) > IN_FLIGHT:
            self._finish_oldest()

    def wait(self) -> None:
        """Wait for every reduction."""
        wait_all([work for _, _, work in self._in_flight])
        while self._in_flight:
            self._finish_oldest()

    def kept(self, index: int) -> Tensor:
        """Return the kept shard of a bucket; zeros if no rank had a micro-batch."""
        shard = self._shards[index]
        if shard is None:
            low, high = self._range(index)
            shard = torch.zeros(high - low, dtype=self._buckets[index].dtype, device=self._device)
            self._shards[index] = shard
        return shard

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """Return the kept shard in fp32, which replaces a 16-bit one."""
        shard = self.kept(index)
        if not is_16_bit(shard.dtype):  # the fp32 sum of several micro-batches
            rescale([shard], factor)
            return shard
        wide = torch.empty_like(shard, dtype=torch.float32)
        kernels.pack(shard, factor, wide)
        self._keep(index, wide)
        return wide

    def set_aside(self) -> None:
        """Keep held means apart, and begin new shards."""
        if self.held:
            super().set_aside()
            self._shards = [None for _ in self._buckets]

    def clear(self, set_to_none: bool) -> None:
        """Discard the kept shards, and free the working tensors."""
        super().clear(set_to_none)
        self._free.extend(self._filling.values())
        self._filling.clear()

    def forget(self) -> None:
        """Forget the kept shards, after the reductions in flight."""
        self.wait()
        super().forget()
        self._shards = [None for _ in self._buckets]

    @property
    def _bytes(self) -> int:
        return sum(shard.nbytes for shard in self._shards if shard is not None)

    def _finish_oldest(self) -> None:
        """Wait for the oldest reduction, and add this rank's shard of it to the kept one."""
        index, working, work = self._in_flight.popleft()
        work.wait()
        shard = self._as_bucket(index, working)[slice(*self._range(index))]
        kept = self._shards[index]
        total = shard.clone() if kept is None else kept.to(sum_dtype(kept.dtype)).add_(shard)
        self._keep(index, total)
        self._free.append(working)

    def _keep(self, index: int, shard: Tensor) -> None:
        self._shards[index] = shard
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _filled(self, index: int) -> Tensor:
        """Return the bucket's part of the working tensor that it is filled into."""
        if index not in self._filling:
            self._filling[index] = self._working_tensor(index)
        return self._as_bucket(index, self._filling[index])

    def _working_tensor(self, index: int) -> Tensor:
        """Return a free working tensor for a bucket, of undefined content."""
        usual = self._sizes[0]
        oversized = self._buckets[index].nbytes > usual
        while True:
            for place, working in enumerate(self._free):
                if (working.nbytes > usual) == oversized:
                    return self._free.pop(place)
            if self._in_flight and not isinstance(self._in_flight[0][2], ChainedWork):
                self._finish_oldest()
            else:  # not by `allocate`, which is collective: only this rank needs it
                size = self._sizes[-1] if oversized else usual
                self._add_working(torch.empty(size, dtype=torch.uint8, device=self._device))

    def _as_bucket(self, index: int, working: Tensor) -> Tensor:
        bucket = self._buckets[index]
        return working[: bucket.nbytes].view(bucket.dtype)

    def _add_working(self, working: Tensor) -> None:
        self._free.append(working)
        self.working_bytes += working.nbytes


def working_sizes(buckets: Sequence[Bucket]) -> list[int]:
    """Return the bytes of each working tensor of `ShardedGradients`: equal ones, oversized last.

    Buckets of several dtypes may be filled at a time, so there is one working tensor for each
    dtype, and one in flight. Buckets more than twice as large as those would need share one of
    their own.
    """
    sizes = sorted((bucket.nbytes for bucket in buckets), reverse=True)
    count = min(len(sizes), len({bucket.dtype for bucket in buckets}) + IN_FLIGHT)
    usual = next(size for size in sizes if size <= 2 * sizes[count - 1])
    oversized = [size for size in sizes if size > usual]
    return [usual] * min(count, len(sizes) - len(oversized)) + oversized[:1]
