"""Memory in which gradients are summed over ranks: flat buckets, or the shards of stage 2.

A bucket is reduced once in a round, which is a whole step (stages 0 and 1) or one micro-batch
(stage 2): `take` is called for each of its parameters, then `flat` and `launched` for the bucket.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.comm_hooks import ChainedWork, wait_all
from zero.kernels import Kernels, copy_scaled, rescale, sum_dtype, view
from zero.layout import Bucket, ParameterSlice
from zero.precision import is_16_bit

IN_FLIGHT = 1  # buckets of stage 2 that are reduced while others are filled


class FlatGradients:
    """Flat gradient buckets for stages 0 and 1; every `parameter.grad` becomes a view of one.

    At the first backward of a step parameters have no gradients, so autograd hands over its own
    tensor, which is copied and scaled into the bucket in one pass; zeroing and accumulating would
    be three. Later micro-batches accumulate in place. With `sharded` this rank keeps its shard of a
    reduced bucket only.
    """

    def __init__(self, collectives: Collectives, *, sharded: bool) -> None:
        self._collectives = collectives
        self._slot = collectives.slot(collectives.rank) if sharded else None
        self._parameters: dict[str, Parameter] = {}
        self._buckets: list[Bucket] = []
        self._memory: list[Tensor] = []  # of each bucket; longer than it by the padding
        self._views: dict[str, Tensor] = {}  # gradients by parameter name
        self._wide_bytes: dict[int, int] = {}  # of fp32 gradients that do not fit into `_memory`
        self._works: list[Work] = []
        self.peak_bytes = 0  # the most that gradients occupied outside of working tensors
        self.working_bytes = 0  # of working tensors

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate memory for more buckets, of parameters by name. Collective."""
        self._parameters.update(parameters)
        for bucket in buckets:
            device = parameters[bucket.entries[0].spec.name].device
            memory = self._collectives.allocate(padded_numel(bucket), bucket.dtype, device)
            self._buckets.append(bucket)
            self._memory.append(memory)
            self.peak_bytes += memory.nbytes
            for entry in bucket.entries:
                parameter = parameters[entry.spec.name]
                self._views[entry.spec.name] = view(memory, entry.start, parameter)
                parameter.grad = None

    def take(self, index: int, entry: ParameterSlice, scale: float) -> Tensor | None:
        """Copy a parameter's gradient of this round into its bucket, times `scale`.

        `p.grad` becomes a view of the bucket, into which later micro-batches accumulate. A
        parameter without a gradient contributes zeros. A scale of 0 gives zeros for any values.
        Returns the scaled gradient, or None where there was none.
        """
        parameter, slot = self._parameters[entry.spec.name], self._views[entry.spec.name]
        gradient = parameter.grad
        if gradient is slot:
            rescale([slot], scale)
            return slot
        parameter.grad = slot
        return copy_scaled(slot, gradient, scale)

    def has_assigned(self, index: int, entry: ParameterSlice) -> bool:
        """Return whether a parameter has a gradient that was assigned: other than zeros."""
        gradient = self._parameters[entry.spec.name].grad
        return gradient is not None and bool(gradient.any())

    def flat(self, index: int) -> Tensor:
        """Return the flat gradients of a bucket, of which every gradient was taken."""
        return self._memory[index][: self._buckets[index].numel]

    def launched(self, index: int, work: Work) -> None:
        """Record the reduction of a bucket, to which its flat gradients belong from now on."""
        self._works.append(work)

    def finish(self) -> None:
        """Wait for every reduction."""
        works, self._works = self._works, []
        wait_all(works)

    def reduced(self, index: int, piece: ParameterSlice) -> Tensor:
        """Return the sum over ranks of a slice that this rank keeps, after `finish`. A view.

        Flat, with elements in the order in which the parameter lies in memory.
        """
        return self._memory[index][piece.start : piece.stop]

    def widened(self, index: int, factor: float, kernels: Kernels) -> Tensor:
        """Return all that this rank keeps of a 16-bit bucket, in fp32 and times a factor. Flat.

        Overwrites what `reduced` returned, if the fp32 gradients fit into the bucket's memory.
        """
        memory, bucket = self._memory[index], self._buckets[index]
        kept = self.flat(index)
        if self._slot is not None:
            kept = kept[slice(*bucket.shard(self._slot))]
        size = kept.numel() * torch.float32.itemsize
        if size <= memory.nbytes:
            wide = memory.view(torch.uint8)[:size].view(torch.float32)
            kept = kept.clone()
        else:
            wide = torch.empty_like(kept, dtype=torch.float32)
            self._wide_bytes[index] = size
            narrow_bytes = sum(memory.nbytes for memory in self._memory)
            self.peak_bytes = narrow_bytes + sum(self._wide_bytes.values())
        kernels.pack(kept, factor, wide)
        return wide

    def clear(self, set_to_none: bool) -> None:
        """Discard all gradients: set every `p.grad` to None, or to its view of a zeroed bucket."""
        self.finish()
        for name, parameter in self._parameters.items():
            parameter.grad = None if set_to_none else self._views[name]
        for memory in () if set_to_none else self._memory:
            memory.zero_()


class ShardedGradients:
    """Gradient shards for stage 2, and a few working tensors in which all buckets take turns.

    A gradient is copied into its bucket's working tensor as it arrives, and `parameter.grad` is
    None again. When the reduction has finished, this rank's shard is added to the kept shard, and
    another bucket takes the working tensor. Backward waits while every working tensor is in flight.
    If all are being filled, because a bucket that is next in order lacks a gradient, one more is
    allocated. With one rank the shard is the whole bucket, and gradients are added to it directly.

    The sum of one micro-batch keeps its 16-bit dtype; several are summed in fp32. The methods are
    those of `FlatGradients`.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives, self._alone = collectives, collectives.size == 1
        self._slot = collectives.slot(collectives.rank)
        self._parameters: dict[str, Parameter] = {}
        self._buckets: list[Bucket] = []
        self._shards: list[Tensor | None] = []  # kept, by bucket
        # Working tensors, of dtype uint8.
        self._filling: dict[int, Tensor] = {}
        self._in_flight: deque[tuple[int, Tensor, Work]] = deque()
        self._free: list[Tensor] = []
        self._spare: dict[int, Tensor] = {}  # for one rank, by bucket
        self._sizes: list[int] = []  # as `working_sizes` returns them
        self._device = torch.device("cpu")  # of all parameters
        self.peak_bytes = self.working_bytes = 0

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate working tensors anew, for all buckets. Collective."""
        self._parameters.update(parameters)
        self._buckets.extend(buckets)
        self._shards.extend(None for _ in buckets)
        self._free, self.working_bytes = [], 0
        self._sizes = working_sizes(self._buckets, self._collectives.size)
        self._device = next(iter(parameters.values())).device
        for size in self._sizes:
            self._add_working(self._collectives.allocate(size, torch.uint8, self._device))
        for parameter in parameters.values():
            parameter.grad = None

    def take(self, index: int, entry: ParameterSlice, scale: float) -> Tensor | None:
        """Move the gradient into its bucket's working tensor, scaled."""
        parameter = self._parameters[entry.spec.name]
        gradient, parameter.grad = parameter.grad, None
        if self._alone and self._shards[index] is not None:
            return self._add_to_shard(index, entry, gradient, scale)
        return copy_scaled(view(self._filled(index), entry.start, parameter), gradient, scale)

    def has_assigned(self, index: int, entry: ParameterSlice) -> bool:
        """Return whether a parameter has a gradient."""
        return self._parameters[entry.spec.name].grad is not None

    def flat(self, index: int) -> Tensor:
        """Return a bucket's part of its working tensor; for one rank, the kept shard if any."""
        if self._alone and index not in self._filling:
            return self._shard(index)
        return self._filled(index)

    def launched(self, index: int, work: Work) -> None:
        """Record the reduction; wait for older ones if they launch collectives while waited for.

        Those collectives must come at the same place in the order of launches on every rank.
        """
        if index in self._filling:
            self._in_flight.append((index, self._filling.pop(index), work))
        in_turn = self._alone or isinstance(work, ChainedWork)
        while in_turn and len(self._in_flight) > (0 if self._alone else IN_FLIGHT):
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
        if not is_16_bit(shard.dtype):  # the fp32 sum of several micro-batches
            rescale([shard], factor)
            return shard
        wide = torch.empty_like(shard, dtype=torch.float32)
        kernels.pack(shard, factor, wide)
        self._keep(index, wide)
        return wide

    def clear(self, set_to_none: bool) -> None:
        """Discard the kept shards; every `p.grad` is None with either argument."""
        self.finish()
        if self._alone:  # fresh memory would cost page faults in every step
            for index, shard in enumerate(self._shards):
                if shard is not None and shard.dtype == self._buckets[index].dtype:
                    self._spare[index] = shard.view(torch.uint8)
        else:
            self._free.extend(self._filling.values())
        self._filling.clear()
        self._shards = [None for _ in self._buckets]
        for parameter in self._parameters.values():
            parameter.grad = None

    def _finish_oldest(self) -> None:
        """Wait for the oldest reduction, and add this rank's shard of it to the kept one."""
        index, working, work = self._in_flight.popleft()
        work.wait()
        shard = self._as_bucket(index, working)[slice(*self._buckets[index].shard(self._slot))]
        if self._alone:
            self._keep(index, shard)  # all of the working tensor, which was made for it
            return
        kept = self._shards[index]
        total = shard.clone() if kept is None else kept.to(sum_dtype(kept.dtype)).add_(shard)
        self._keep(index, total)
        self._free.append(working)

    @torch.no_grad()
    def _add_to_shard(
        self, index: int, entry: ParameterSlice, gradient: Tensor | None, scale: float
    ) -> Tensor | None:
        """Add a gradient of a later micro-batch to the kept shard, with one rank."""
        if gradient is None:
            return None
        shard, parameter = self._shard(index), self._parameters[entry.spec.name]
        if scale != 1:
            scaled = torch.empty_like(parameter)
            copy_scaled(scaled, gradient, scale)
            gradient = scaled
        kept = shard.to(sum_dtype(shard.dtype))
        view(kept, entry.start, parameter).add_(gradient)
        self._keep(index, kept)
        return gradient

    def _keep(self, index: int, shard: Tensor) -> None:
        self._shards[index] = shard
        total = sum(shard.nbytes for shard in self._shards if shard is not None)
        self.peak_bytes = max(self.peak_bytes, total)

    def _shard(self, index: int) -> Tensor:
        """Return the kept shard of a bucket; zeros if no rank had a micro-batch."""
        shard = self._shards[index]
        if shard is None:
            bucket = self._buckets[index]
            low, high = bucket.shard(self._slot)
            shard = torch.zeros(high - low, dtype=bucket.dtype, device=self._device)
            self._shards[index] = shard
        return shard

    def _filled(self, index: int) -> Tensor:
        """Return the bucket's part of the working tensor that it is filled into."""
        if index not in self._filling:
            self._filling[index] = self._working_tensor(index)
        return self._as_bucket(index, self._filling[index])

    def _working_tensor(self, index: int) -> Tensor:
        """Return a free working tensor for a bucket, of undefined content."""
        needed = self._buckets[index].nbytes
        if self._alone:  # it becomes the kept shard
            if index in self._spare:
                return self._spare.pop(index)
            return torch.empty(needed, dtype=torch.uint8, device=self._device)
        usual = self._sizes[0]
        oversized = needed > usual
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


Gradients: TypeAlias = FlatGradients | ShardedGradients


def padded_numel(bucket: Bucket) -> int:
    """Return the elements of a flat bucket's memory, in which half of it fits in fp32."""
    return bucket.numel + (bucket.numel % 2 if is_16_bit(bucket.dtype) else 0)


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
