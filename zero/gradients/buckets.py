"""Gradients that are summed over ranks, bucket by bucket, and the memory in which they are summed.

A reduction is one backward, with the gradients that `no_sync` left to it (stages 0 and 1), or one
micro-batch (stage 2). For each parameter, `take` moves its gradient into its bucket; then the
bucket is launched. `finish` makes means of the sums. From then on the means are `held` until
`clear`, and further backward passes add to them.

    class               stages   of each bucket this rank has
    BucketGradients     0, 1     all elements, of which it keeps all (0) or its shard (1)
    BucketsInTurns      2        its shard; all elements while it is filled and reduced

Kept tensors are flat, and have the elements of a parameter in the order in which it lies in memory.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.collectives import Collectives, Work
from zero.comm_hooks import ChainedWork, wait_all
from zero.gradients.slots import RefusedSlots, Slots, VisibleSlots
from zero.kernels import copy_scaled, own_view, pack, rescale, sum_dtype, view
from zero.layout import Bucket, ParameterSlice
from zero.precision import is_16_bit

IN_FLIGHT = 1  # buckets that are reduced while others are filled, where they take turns


class Gradients:
    """The gradients of buckets, and the most bytes that they took.

    `slots` are what `parameter.grad` is.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots, self.held = slots, False
        self.buckets: list[Bucket] = []
        self.peak_bytes = 0  # outside of working tensors
        self.working_bytes = 0  # of working tensors
        self._wide_bytes: dict[int, int] = {}  # of fp32 gradients beside 16-bit ones, by bucket

    @property
    def nbytes(self) -> int:
        """The bytes of all buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Hold the gradients of more buckets, of parameters by name."""
        self.buckets.extend(buckets)
        for name, parameter in parameters.items():
            self.slots.add(name, parameter)

    def note_peak(self, nbytes: int) -> None:
        """Count bytes that are in use at a time."""
        self.peak_bytes = max(self.peak_bytes, nbytes)

    def note_wide(self, index: int, wide: Tensor) -> None:
        """Count the fp32 gradients of a 16-bit bucket, which have memory of their own."""
        self._wide_bytes[index] = wide.nbytes
        self.note_peak(self.nbytes + sum(self._wide_bytes.values()))


class BucketGradients(Gradients):
    """Gradients that are summed over ranks in buckets, each in memory of its own.

    At the first backward parameters have no gradients, so autograd hands over its own tensor, which
    is copied and scaled into the bucket in one pass; zeroing and accumulating would be three. Later
    micro-batches accumulate in place.
    """

    slots: VisibleSlots | RefusedSlots

    def __init__(self, collectives: Collectives, stage: int) -> None:
        self._places: dict[str, Tensor] = {}  # of gradients, by parameter name
        visible = VisibleSlots(self._places, silent=collectives.rank > 0)
        super().__init__(RefusedSlots(stage) if stage else visible)
        self._collectives = collectives
        # The slot of the shard that this rank keeps; None for all.
        self._owner = collectives.slot(collectives.rank) if stage else None
        # Of each bucket, the first element that this rank keeps, and that after the last.
        self._ranges: list[tuple[int, int]] = []
        self._aside: dict[int, Tensor] = {}  # kept means of earlier reductions, by bucket
        self._aside_names: set[str] = set()
        self._memory: list[Tensor] = []  # of each bucket; longer than it by the padding
        self._kept: list[Tensor] = []  # the part that this rank keeps
        self._wide: dict[int, Tensor] = {}  # those that have replaced the 16-bit ones
        self._works: list[Work] = []

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Allocate memory for more buckets, of parameters by name. Collective."""
        self._note(buckets, parameters)
        for bucket, kept in zip(buckets, self._ranges[len(self._memory) :], strict=True):
            device = parameters[bucket.entries[0].spec.name].device
            # At stage 1, half of a 16-bit bucket fits in fp32.
            padding = 0 if self._owner is None else bucket.numel % 2 * is_16_bit(bucket.dtype)
            memory = self._collectives.allocate(bucket.numel + padding, bucket.dtype, device)
            self._memory.append(memory)
            self._kept.append(memory[slice(*kept)])
            for entry in bucket.entries:
                name = entry.spec.name
                self._places[name] = own_view(memory, entry.start, parameters[name])
        self.note_peak(self.nbytes)

    def _note(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        super().add(buckets, parameters)
        owner = self._owner
        self._ranges += [(0, b.numel) if owner is None else b.shard(owner) for b in buckets]

    # A reduction.

    @property
    def aside(self) -> list[str]:
        """The names of parameters whose held means are added to the coming ones, in order."""
        return sorted(self._aside_names)

    def begin(self) -> None:
        """Begin a reduction, apart from held means unless autograd adds to these."""
        if not self.slots.accumulate:
            self.set_aside()
        self.renew()

    def take(self, index: int, entry: ParameterSlice, scale: float) -> Tensor | None:
        """Move a parameter's gradient into its bucket, times `scale`; 0 gives zeros for any values.

        Returns the scaled gradient, or None where there was none: that contributes zeros.
        """
        place, gradient = self.place(index, entry), self.slots.pop(entry.spec.name)
        if gradient is not place:
            return copy_scaled(place, gradient, scale)
        rescale([place], scale)  # it has accumulated there
        return place

    def accumulate(self, index: int, entry: ParameterSlice) -> None:
        """Keep a parameter's gradient for the reduction that a later backward finishes. Local."""
        self.slots.hold(entry.spec.name, self.take(index, entry, 1.0))

    def own(self) -> list[Tensor]:
        """Return this rank's gradients of all buckets, taken and not launched. Views."""
        return [self.flat(index) for index in range(len(self.buckets))]

    def separate(self) -> None:
        """Set held means aside, and let the coming backward not add to what shows them."""
        self.set_aside()
        if self.slots.accumulate:
            self.slots.void()

    def set_aside(self) -> None:
        """Keep held means apart from a coming reduction, to whose result `finish` adds them."""
        if not self.held:
            return
        self.held = False
        for index, bucket in enumerate(self.buckets):
            names = {entry.spec.name for entry in bucket.entries}
            gone = {name for name in names if not self.slots.keeps(name)}
            if gone == names:
                continue
            self._aside[index] = self.part(index).clone()
            low = self._ranges[index][0]
            for piece in bucket.pieces(*self._ranges[index]):
                if piece.spec.name in gone:
                    self._aside[index][piece.start - low : piece.stop - low].zero_()
            self._aside_names |= names - gone
        beside = sum(tensor.nbytes for tensor in self._aside.values())
        self.note_peak(self.nbytes + beside)

    @torch.no_grad()
    def finish(self, factor: float, unused: Collection[str], of_held: float = 1.0) -> None:
        """Wait for the sums, multiply them by a factor, and hold them.

        Means that were held before are added, times `of_held`. `parameter.grad` is published; it is
        None for names in `unused`.
        """
        self.wait()
        self.scale_(factor)
        for index, mean in self._aside.items():
            self.part(index).add_(mean, alpha=of_held)
        self._aside.clear()
        for name, parameter in self.slots.parameters.items():
            if name in unused and name not in self._aside_names:
                parameter.grad = None
            else:
                self.slots.publish(name)
        self._aside_names.clear()
        self.held = True

    # Means.

    @torch.no_grad()
    def collect(self) -> frozenset[str]:
        """Take over what was done to `parameter.grad` since `finish`. Local.

        Returns the names of parameters whose `grad` is None. Raises RuntimeError for a gradient
        that was assigned at stages 1 and 2.
        """
        dropped = set()
        for index, bucket in enumerate(self.buckets):
            for entry in bucket.entries:
                name = entry.spec.name
                if self.slots.keeps(name):
                    continue
                assigned = self.slots.adopt(name)
                if assigned is None:
                    dropped.add(name)
                    self._zero(index, name)
                else:
                    copy_scaled(self.place(index, entry), assigned, 1.0)
                    self.slots.publish(name)
        return frozenset(dropped)

    def _zero(self, index: int, name: str) -> None:
        for piece in self.buckets[index].pieces(*self._ranges[index]):
            if piece.spec.name == name:
                self.reduced(index, piece).zero_()

    def reduced(self, index: int, piece: ParameterSlice) -> Tensor:
        """Return the mean of a slice that this rank keeps. Flat; a view."""
        start = piece.start - self._ranges[index][0]
        return self.part(index)[start : start + piece.numel]

    def kept(self, index: int) -> list[Tensor]:
        """Return the means of a bucket that this rank keeps: one flat tensor. A view."""
        return [self.part(index)]

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Multiply the held means by a factor, after `collect`."""
        rescale([self.part(index) for index in range(len(self.buckets))], factor)

    def clear(self, set_to_none: bool) -> None:
        """Discard all gradients: every `p.grad` becomes None, or stands for zeros if wanted."""
        self.wait()
        self.forget()
        for name, parameter in self.slots.parameters.items():
            if set_to_none or self.slots.dropped(name):
                parameter.grad = None
            else:
                self.slots.publish(name)
                if (gradient := parameter.grad) is not None and gradient.requires_grad:
                    gradient.detach_()
        if not set_to_none:
            self.scale_(0)
            self.held = True

    def forget(self) -> None:
        """Forget what is kept, after every `p.grad` was dropped."""
        self._aside.clear()
        self._aside_names.clear()
        self.held = False
        self.renew()

    # The memory.

    def renew(self) -> None:
        """Let the buckets take other gradients: those that were widened are no longer read."""
        self._wide.clear()

    def place(self, index: int, entry: ParameterSlice) -> Tensor:
        """Return the view of a bucket that a parameter's gradient is copied into."""
        return self._places[entry.spec.name]

    def flat(self, index: int) -> Tensor:
        """Return the flat gradients of a bucket, of which every gradient was taken."""
        return self._memory[index][: self.buckets[index].numel]

    def launched(self, index: int, work: Work) -> None:
        """Record the reduction of a bucket, to which its flat gradients belong from now on.

        Advance the one before, so that the second collective of a chain overlaps backward, too. The
        first one of a hook between nodes stays in the node, and is over soon.
        """
        before = self._works[-1] if self._works else None
        self._works.append(work)
        if isinstance(before, ChainedWork):
            before.advance()

    def wait(self) -> None:
        """Wait for every reduction."""
        works, self._works = self._works, []
        wait_all(works)

    def part(self, index: int) -> Tensor:
        """Return the sums or means of a bucket that this rank keeps. A view."""
        return self._wide[index] if index in self._wide else self._kept[index]

    def widened(self, index: int, factor: float) -> Tensor:
        """Return all that this rank keeps of a 16-bit bucket, in fp32 and times a factor. Flat.

        It overwrites `kept` if it fits into the bucket; otherwise `kept` is multiplied, too.
        """
        memory, kept = self._memory[index], self.part(index)
        size = kept.numel() * torch.float32.itemsize
        if size <= memory.nbytes:
            wide = memory.view(torch.uint8)[:size].view(torch.float32)
            kept = kept.clone()
            self._wide[index] = wide
        else:
            wide = torch.empty_like(kept, dtype=torch.float32)
            self.note_wide(index, wide)
        pack(kept, factor, wide)
        if index not in self._wide:
            rescale([kept], factor)
        return wide

    @property
    def nbytes(self) -> int:
        """The bytes of all buckets, with what pads them."""
        return sum(memory.nbytes for memory in self._memory)


class BucketsInTurns(BucketGradients):
    """Shards of buckets, and a few working tensors in which all buckets take turns.

    A gradient is copied into its bucket's working tensor as it arrives. When the reduction has
    finished, this rank's shard is added to the kept shard, and another bucket takes the working
    tensor. Backward waits while every working tensor is in flight. If all are being filled, because
    a bucket that is next in order lacks a gradient, one more is allocated.

    The sum of one micro-batch keeps its 16-bit dtype; several are summed in fp32.
    """

    def __init__(self, collectives: Collectives, stage: int) -> None:
        super().__init__(collectives, stage)
        self._parameters: dict[str, Parameter] = {}
        self._shards: list[Tensor | None] = []  # kept, by bucket
        # Working tensors, of dtype uint8.
        self._filling: dict[int, Tensor] = {}
        self._in_flight: deque[tuple[int, Tensor, Work]] = deque()
        self._free: list[Tensor] = []
        self._sizes: list[int] = []  # as `working_sizes` returns them
        self._device = torch.device("cpu")  # of all parameters

    def add(self, buckets: Sequence[Bucket], parameters: Mapping[str, Parameter]) -> None:
        """Wait for every reduction, and allocate working tensors anew, for all buckets. Collective.

        Not while buckets are filled.
        """
        self.wait()
        self._filling.clear()
        self._note(buckets, parameters)
        self._parameters.update(parameters)
        self._shards.extend(None for _ in buckets)
        self._free, self.working_bytes = [], 0
        self._sizes = working_sizes(self.buckets)
        self._device = next(iter(parameters.values())).device
        for size in self._sizes:
            self._add_working(self._collectives.allocate(size, torch.uint8, self._device))

    def renew(self) -> None:
        """Begin new shards, after the reductions in flight, and free the working tensors."""
        self.wait()
        self._shards = [None for _ in self.buckets]
        self._free.extend(self._filling.values())
        self._filling.clear()

    def place(self, index: int, entry: ParameterSlice) -> Tensor:
        """Return the view of a working tensor that a parameter's gradient is copied into."""
        return view(self.flat(index), entry.start, self._parameters[entry.spec.name])

    def flat(self, index: int) -> Tensor:
        """Return the bucket's part of the working tensor that it is filled into."""
        if index not in self._filling:
            self._filling[index] = self._working_tensor(index)
        return self._as_bucket(index, self._filling[index])

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

    def part(self, index: int) -> Tensor:
        """Return the kept shard of a bucket; zeros if no rank had a micro-batch."""
        shard = self._shards[index]
        if shard is None:
            low, high = self._ranges[index]
            shard = torch.zeros(high - low, dtype=self.buckets[index].dtype, device=self._device)
            self._shards[index] = shard
        return shard

    def widened(self, index: int, factor: float) -> Tensor:
        """Return the kept shard in fp32 and times a factor, which replaces a 16-bit one."""
        shard = self.part(index)
        if not is_16_bit(shard.dtype):  # the fp32 sum of several micro-batches
            rescale([shard], factor)
            return shard
        wide = torch.empty_like(shard, dtype=torch.float32)
        pack(shard, factor, wide)
        self._keep(index, wide)
        return wide

    @property
    def nbytes(self) -> int:
        """The bytes of all kept shards."""
        return sum(shard.nbytes for shard in self._shards if shard is not None)

    def _finish_oldest(self) -> None:
        index, working, work = self._in_flight.popleft()
        work.wait()
        shard = self._as_bucket(index, working)[slice(*self._ranges[index])]
        kept = self._shards[index]
        total = shard.clone() if kept is None else kept.to(sum_dtype(kept.dtype)).add_(shard)
        self._keep(index, total)
        self._free.append(working)

    def _keep(self, index: int, shard: Tensor) -> None:
        self._shards[index] = shard
        self.note_peak(self.nbytes)

    def _working_tensor(self, index: int) -> Tensor:
        """Return a free working tensor for a bucket, of undefined content."""
        usual = self._sizes[0]
        oversized = self.buckets[index].nbytes > usual
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
        bucket = self.buckets[index]
        return working[: bucket.nbytes].view(bucket.dtype)

    def _add_working(self, working: Tensor) -> None:
        self._free.append(working)
        self.working_bytes += working.nbytes


def working_sizes(buckets: Sequence[Bucket]) -> list[int]:
    """Return the bytes of each working tensor of `BucketsInTurns`: equal ones, oversized last.

    Buckets of several dtypes may be filled at a time, so there is one working tensor for each
    dtype, and one in flight. Buckets more than twice as large as those would need share one of
    their own.
    """
    sizes = sorted((bucket.nbytes for bucket in buckets), reverse=True)
    count = min(len(sizes), len({bucket.dtype for bucket in buckets}) + IN_FLIGHT)
    usual = next(size for size in sizes if size <= 2 * sizes[count - 1])
    oversized = [size for size in sizes if size > usual]
    return [usual] * min(count, len(sizes) - len(oversized)) + oversized[:1]
