"""`Collectives` over a process group of torch.distributed: gloo, NCCL, RCCL, XCCL, or any other.

    call             elements             how they travel
    all_reduce       of 32 bits or more   an all-reduce of the group
                     of 16, or `wire`     rounded addends to the owners | sums in fp32 | all-gather
    reduce_scatter   of 32 bits or more   a reduce to the owner of each shard, or one reduce-scatter
                     of 16, or `wire`     rounded addends to the owners | sums in fp32
    all_gather       any, as bytes        a broadcast of each shard, or one all-gather

One reduce-scatter or all-gather needs shards of one size. Gloo's are slower than the reduces or
broadcasts that they would replace, so it never takes them.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero.collectives import Bounds, CompletedWork, Work
from zero.comm_hooks import ChainedWork
from zero.kernels import add, expect_flat
from zero.layout import shard_bounds
from zero.precision import is_16_bit, narrower


class TorchWork:
    """A `Work` of one or several works of torch."""

    def __init__(self, works: Sequence[Any], what: str) -> None:
        self._works, self._what = works, what

    def done(self) -> bool:
        """Return whether all have finished; see `Work.done`."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Return when the result may be used; see `Work.wait`."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self._what} has failed: {error}") from error
        self._works = ()  # they hold the tensor


class TorchCollectives:
    """`zero.Collectives` over the ranks of a process group, by default of a new one of all ranks.

    Construction without a group is collective over all ranks. The new group has the backends and
    the timeout of the default group, and ends with `destroy_process_group`. Its calls need no order
    beside those of other groups. A given group is used as it is: all calls of it, the caller's too,
    come in one order on its ranks. Optimizers whose buckets one backward fills need a group each.

    Slots are ranks. Every rank counts as a node: a sum of 16 bits, or with `wire`, adds the rounded
    addends in fp32 in the order of ranks. Sums of wider numbers are those of the backend: the same
    bits on every rank, but those of `reduce_scatter` may differ from those of `all_reduce`.

    Works on a GPU let the current stream wait, as torch's do. Errors of the backend, as after the
    end of another rank's process, are RuntimeErrors of `wait`, which name the call.

    Raises ValueError if there is no default group, if this process is no rank of the given one, and
    if the group has no backend for tensors on the CPU, where small messages are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if dist.get_rank(group) < 0:
            raise ValueError("this process is no rank of the group: call this on its ranks alone")
        backends = _backends(group)
        if "cpu" not in backends:
            raise ValueError(
                f"the process group communicates by {', '.join(backends.values())} on "
                f"{', '.join(backends)} alone, and small messages are on the CPU: call "
                "init_process_group() without a backend, or with cpu:gloo beside it"
            )
        self._group = group or dist.new_group(timeout=_timeout(backends))
        self._ranks = dist.get_process_group_ranks(self._group)  # of the default group
        self._by_gloo = {device for device, backend in backends.items() if backend == "gloo"}
        self.rank, self.size = dist.get_rank(self._group), len(self._ranks)
        self._label = ""

    def slot(self, rank: int) -> int:
        """Return the rank."""
        return rank

    def named(self, label: str, ratio: float = 1) -> "TorchCollectives":
        """Return the same collectives, whose calls are for what `label` says. Local."""
        other = copy.copy(self)
        other._label = label
        return other

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros in ordinary memory. Local."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, wire: torch.dtype | None = None) -> Work:
        """Start to sum a tensor over all ranks, in place. Collective."""
        expect_flat(tensor, wire)
        if self.size == 1:
            return CompletedWork()
        tensor, what = tensor.detach(), self._describe("all_reduce", tensor)
        if travels := _narrow(tensor.dtype, wire):
            bounds = shard_bounds(None, tensor.numel(), self.size)
            return ChainedWork(self._sum_rounded(tensor, bounds, travels, what, everywhere=True))
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return TorchWork([dist.all_reduce(real, group=self._group, async_op=True)], what)

    def reduce_scatter(
        self, tensor: Tensor, bounds: Bounds = None, wire: torch.dtype | None = None
    ) -> Work:
        """Start to sum over all ranks, in place; valid in this rank's shard alone. Collective."""
        expect_flat(tensor, wire)
        cut = shard_bounds(bounds, tensor.numel(), self.size)
        if self.size == 1:
            return CompletedWork()
        tensor, what = tensor.detach(), self._describe("reduce_scatter", tensor)
        if travels := _narrow(tensor.dtype, wire):
            return ChainedWork(self._sum_rounded(tensor, cut, travels, what, everywhere=False))
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if self._as_one(tensor, cut):
            return ChainedWork(self._scatter_sum(real, cut, what))
        works = [
            dist.reduce(real[low:high], rank, group=self._group, async_op=True)
            for rank, low, high in self._shards(cut)
        ]
        return TorchWork(works, what)

    def all_gather(self, tensor: Tensor, bounds: Bounds = None) -> Work:
        """Start to copy this rank's shard to all ranks, in place. Collective."""
        expect_flat(tensor)
        cut = shard_bounds(bounds, tensor.numel(), self.size)
        if self.size == 1:
            return CompletedWork()
        what, flat = self._describe("all_gather", tensor), _bytes(tensor)
        cut = tuple(bound * tensor.element_size() for bound in cut)
        if self._as_one(tensor, cut):
            own = flat[cut[self.rank] : cut[self.rank + 1]]
            return TorchWork([_all_gather_single(flat, own, self._group, async_op=True)], what)
        works = [
            dist.broadcast(flat[low:high], rank, group=self._group, async_op=True)
            for rank, low, high in self._shards(cut)
        ]
        return TorchWork(works, what)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """Start to copy the root's tensor to all ranks, in place. Collective."""
        expect_flat(tensor)
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is no rank of this group: 0 to {self.size - 1}")
        if self.size == 1:
            return CompletedWork()
        flat, source = _bytes(tensor), self._ranks[root]
        work = dist.broadcast(flat, source, group=self._group, async_op=True)
        return TorchWork([work], self._describe("broadcast", tensor))

    def _describe(self, verb: str, tensor: Tensor) -> str:
        """Return words for a call in errors."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        label = f"{self._label}: " if self._label else ""
        return f"rank {self.rank}: {label}{verb} of {tensor.numel()} {dtype}"

    def _shards(self, bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield the global rank, start and stop of shards that are not empty."""
        for rank, (low, high) in zip(self._ranks, pairwise(bounds), strict=True):
            if low < high:
                yield rank, low, high

    def _as_one(self, tensor: Tensor, bounds: Sequence[int]) -> bool:
        """Return whether one collective of the backend takes all shards."""
        sizes = {high - low for low, high in pairwise(bounds)}
        return len(sizes) == 1 and sizes != {0} and tensor.device.type not in self._by_gloo

    def _scatter_sum(self, tensor: Tensor, bounds: Sequence[int], what: str) -> Iterator[Work]:
        own = tensor[bounds[self.rank] : bounds[self.rank + 1]]
        total = torch.empty_like(own)  # not every backend writes into its input
        yield TorchWork([_reduce_scatter(total, tensor, group=self._group, async_op=True)], what)
        own.copy_(total)

    def _sum_rounded(
        self,
        tensor: Tensor,
        bounds: Sequence[int],
        travels: torch.dtype,
        what: str,
        *,
        everywhere: bool,
    ) -> Iterator[Work]:
        """Send rounded addends to the owner of each shard, which adds them in the order of ranks.

        Takes as much memory again as the addends, until the next step.
        """
        low, high = bounds[self.rank], bounds[self.rank + 1]
        sent, count = tensor.to(travels), high - low
        received = sent.new_empty(self.size * count)
        lengths = [(stop - start) * travels.itemsize for start, stop in pairwise(bounds)]
        work = dist.all_to_all_single(
            _bytes(received),
            _bytes(sent),
            [count * travels.itemsize] * self.size,
            lengths,
            group=self._group,
            async_op=True,
        )
        yield TorchWork([work], what)
        add(received.view(self.size, count).unbind(), sent[low:high])
        del received
        if everywhere:
            yield self.all_gather(sent, bounds)
            low, high = 0, tensor.numel()
        if sent is not tensor:
            tensor[low:high].copy_(sent[low:high])


# The first names are deprecated since torch 2.13.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _narrow(dtype: torch.dtype, wire: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which addends travel that are rounded; None if they are summed as is."""
    return narrower(wire, dtype) or (dtype if is_16_bit(dtype) else None)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor: backends lack some dtypes."""
    return tensor.detach().view(torch.uint8)


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backends of a group, by default of the default group, by device type."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def _timeout(devices: Iterable[str]) -> timedelta | None:
    """Return the timeout of the default group on one of some devices; None if it does not tell."""
    default = dist.group.WORLD
    assert default is not None, "get_rank has found it"
    with suppress(RuntimeError):  # a group may have no backend beside itself
        backend = default._get_backend(torch.device(next(iter(devices))))
        timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
        return timeout
    return None
