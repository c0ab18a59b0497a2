"""The `Collectives` protocol between this package and a communication library."""

import pickle
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from zero.kernels import without_repeats

T = TypeVar("T")
Bounds: TypeAlias = Sequence[int] | None


class AllRanksError(Exception):
    """Base class of errors that all ranks raise together, so that they may go on together."""


class Work(Protocol):
    """An asynchronous operation that was started."""

    def wait(self) -> object:
        """Block until the result may be used by the calling thread and its current CUDA stream.

        Raises the error of the operation. A second call returns at once.
        """

    def done(self) -> bool:
        """Return whether what was started has finished. Local; never blocks.

        Then `wait` blocks only for what it starts itself, as that of a chain does. An operation
        that was asked for progresses while the caller computes. Raises the error by which all
        communication has ended, if it has.
        """


class Collectives(Protocol):
    """Asynchronous in-place collectives on flat tensors, over a group of ranks.

    Every method except `slot` and `named` is collective: all ranks make the same calls in the same
    order, with tensors of equal length and dtype. A call returns at once; the tensor belongs to the
    collective until `wait` of its `Work` returns. Sums accumulate in fp32 or wider. No collective
    divides.

    A tensor of n elements consists of `size` shards. Slot s is the elements bounds[s] to
    bounds[s + 1], by default ``s * n // size`` to ``(s + 1) * n // size``. `bounds` are size + 1
    non-decreasing indices from 0 to n, the same on all ranks; shards may be empty and of any
    lengths. `slot` maps a rank to the slot that it owns: after a two-level reduce-scatter, shards
    are not in the order of ranks.

    `wire` is the dtype in which a sum travels between nodes, by default the tensor's own. With a
    16-bit wire dtype each node rounds its sum, the rounded sums are added in fp32 in the order of
    nodes, and the result is rounded again, to the same bits on every rank.

    Over MPI, equal data give equal bits in `all_reduce` and in `reduce_scatter`, for any bounds and
    any position of an element in the tensor.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 to size - 1."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def slot(self, rank: int) -> int:
        """Return the index of a rank's shard: a bijection of 0 to size - 1. Local."""

    def named(self, label: str, ratio: float = 1) -> "Collectives":
        """Return the same collectives, whose calls are for what `label` says. Local.

        The label of a call, such as "bucket 3", is the same on all ranks; errors contain it. Calls
        with compressed content would send `ratio` bytes without, for each that they send: reports
        have both. A narrower `wire` counts besides.
        """

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new flat tensor of zeros, in memory that these collectives access fastest.

        Collective, with the same arguments on every rank. The tensor keeps its memory alive.
        """

    def all_reduce(self, tensor: Tensor, wire: torch.dtype | None = None) -> Work:
        """Replace the tensor by its sum over ranks, with the same bits on every rank."""

    def reduce_scatter(
        self, tensor: Tensor, bounds: Bounds = None, wire: torch.dtype | None = None
    ) -> Work:
        """Replace this rank's shard by its sum over ranks; the other elements become undefined.

        Raises ValueError for bounds that do not cut the tensor into `size` shards.
        """

    def all_gather(self, tensor: Tensor, bounds: Bounds = None) -> Work:
        """Replace every shard by that of the rank that owns it.

        Raises ValueError for bounds that do not cut the tensor into `size` shards.
        """

    def broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        """Replace the tensor by root's."""


class CompletedWork:
    """A `Work` that has finished."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


class SingleProcessCollectives:
    """`Collectives` of one rank: no collective changes or copies anything."""

    rank = 0
    size = 1

    def slot(self, rank: int) -> int:
        """Return the rank."""
        return rank

    def named(self, label: str, ratio: float = 1) -> "SingleProcessCollectives":
        """Return these collectives."""
        return self

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros in ordinary memory."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, *_: object, **__: object) -> Work:
        """Leave the tensor as it is."""
        return CompletedWork()

    reduce_scatter = all_gather = broadcast = all_reduce


@torch.no_grad()
def broadcast_from_rank_0(collectives: Collectives, tensors: Iterable[Tensor]) -> None:
    """Overwrite each tensor, in place, with rank 0's. Collective; waits for the result.

    Tensors of equal dtype and device travel together, in one broadcast of a flat copy; of expanded
    ones, every element once.
    """
    if collectives.size == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in map(without_repeats, tensors):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in by_kind.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        collectives.broadcast(flat).wait()
        parts = torch.split(flat, [tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def gather_objects(collectives: Collectives, local_object: T) -> list[T]:
    """Return the objects of all ranks, by rank, on every rank. Collective.

    Objects are pickled, and should be small.
    """
    packed = torch.frombuffer(bytearray(pickle.dumps(local_object)), dtype=torch.uint8)
    slots = [collectives.slot(rank) for rank in range(collectives.size)]
    lengths = torch.zeros(collectives.size, dtype=torch.int64, device="cpu")
    lengths[slots[collectives.rank]] = len(packed)
    collectives.all_reduce(lengths).wait()
    bounds = [0, *torch.cumsum(lengths, 0).tolist()]
    parts = [slice(bounds[slot], bounds[slot + 1]) for slot in slots]
    gathered = torch.empty(bounds[-1], dtype=torch.uint8, device="cpu")
    gathered[parts[collectives.rank]] = packed
    collectives.all_gather(gathered, bounds).wait()
    return [pickle.loads(gathered[part].numpy().tobytes()) for part in parts]
