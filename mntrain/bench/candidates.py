"""The collectives that are compared: mntrain's by one algorithm, and the MPI library's own.

Every result is verified bitwise. Contributions and all their partial sums are small integers, which
no dtype rounds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mntrain.comm.collectives import WorldCollectives
from zero.layout import split

NATIVE = {
    "all_reduce": "MPI_Allreduce",
    "reduce_scatter": "MPI_Reduce_scatter",
    "all_gather": "MPI_Allgather",
    "broadcast": "MPI_Bcast",
}
_POISON = -9.0  # in no pattern: reveals elements that a collective has not written
# The pattern repeats after 5 * 11 elements. No power of two is a multiple of that, so a chunk, lane
# or shard in the wrong place differs from the right one.
_PERIOD = 55
_TILE = _PERIOD << 12


class Pattern:
    """One rank's contribution to every element, and the sum over all ranks there.

    The contribution of rank r to element i is (i + 13 r) mod 5 - 2, plus i mod 11 on rank 0. The
    former adds up to 0 over any five consecutive ranks. Each is stored as one tile, which repeats.
    """

    def __init__(self, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        index = torch.arange(_TILE)
        base = index % 11
        contribution = _cycle(index, rank) + (base if rank == 0 else 0)
        total = base + sum(_cycle(index, other) for other in range(size % 5))
        self.contribution = contribution.to(device, dtype)
        self.total = total.to(device, dtype)


def fill(part: Tensor, tile: Tensor, start: int = 0) -> None:
    """Fill a flat part of a tensor, which begins at element `start`, with the repeated tile."""
    for low, high, piece in _pieces(part, tile, start):
        part[low:high] = piece


def matches(part: Tensor, tile: Tensor, start: int = 0) -> bool:
    """Return whether a flat part of a tensor holds what `fill` would write. Bitwise."""
    return all(
        torch.equal(part[low:high], piece) for low, high, piece in _pieces(part, tile, start)
    )


class Candidate(ABC):
    """One implementation of one collective on a tensor of one size."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def prepare(self) -> None:
        """Write this rank's contribution. Local, not timed."""

    @abstractmethod
    def run(self) -> None:
        """Run the collective until this rank has its result. Collective, timed."""

    @abstractmethod
    def is_correct(self) -> bool:
        """Return whether this rank's result is bitwise correct. Local."""


class LibraryCandidate(Candidate):
    """A collective of `WorldCollectives`, in place on a flat tensor that candidates share."""

    def __init__(
        self, name: str, verb: str, collectives: WorldCollectives, tensor: Tensor, pattern: Pattern
    ) -> None:
        super().__init__(name)
        self._verb, self._tensor, self._pattern = verb, tensor, pattern
        self._collective: Callable[[Tensor], Any] = getattr(collectives, verb)
        slot, bounds = collectives.slot(collectives.rank), split(tensor.numel(), collectives.size)
        self._start = bounds[slot]
        self._shard = tensor[bounds[slot] : bounds[slot + 1]]
        self._is_root = collectives.rank == 0

    def prepare(self) -> None:
        """Write this rank's contribution, and wait until the device has written it."""
        if self._verb in ("all_reduce", "reduce_scatter"):
            fill(self._tensor, self._pattern.contribution)
        else:
            self._tensor.fill_(_POISON)
        if self._verb == "all_gather":
            fill(self._shard, self._pattern.total, self._start)
        elif self._verb == "broadcast" and self._is_root:
            fill(self._tensor, self._pattern.total)
        if self._tensor.is_cuda:
            torch.cuda.synchronize(self._tensor.device)

    def run(self) -> None:
        """Run the collective, and wait for the stream that orders its result."""
        self._collective(self._tensor).wait()
        if self._tensor.is_cuda:
            torch.cuda.current_stream(self._tensor.device).synchronize()

    def is_correct(self) -> bool:
        """Compare this rank's shard, or the whole tensor, with the pattern."""
        if self._verb == "reduce_scatter":
            return matches(self._shard, self._pattern.total, self._start)
        return matches(self._tensor, self._pattern.total)


class MpiCandidate(Candidate):
    """A blocking collective of the MPI library, on fp32 in host memory, out of place.

    `comm` is an mpi4py communicator over the world that carries nothing else. `pattern` is fp32 on
    the CPU.
    """

    def __init__(
        self, verb: str, comm: Any, nbytes: int, pattern: Pattern, name: str | None = None
    ) -> None:
        super().__init__(name or NATIVE[verb])
        self._total = pattern.total
        bounds = split(nbytes // 4, comm.size)
        counts = [high - low for low, high in pairwise(bounds)]
        whole, shard = (0, bounds[-1]), (bounds[comm.rank], bounds[comm.rank + 1])
        # Elements [start, stop) of the tensor that this rank sends, and that it receives.
        sends = {"all_gather": shard, "broadcast": whole if comm.rank == 0 else (0, 0)}
        send_start, send_stop = sends.get(verb, whole)
        self._send_start = send_start
        receive_start, receive_stop = shard if verb == "reduce_scatter" else whole
        self._receive_start = receive_start
        self._target = torch.empty(receive_stop - receive_start)
        # A broadcast is in place: only the root fills its buffer.
        length = send_stop - send_start
        self._source = self._target[:length] if verb == "broadcast" else torch.empty(length)
        reduces = verb in ("all_reduce", "reduce_scatter")
        self._contribution = pattern.contribution if reduces else pattern.total
        source, target = self._source.numpy(), self._target.numpy()
        self._collective: Callable[[], Any] = {
            "all_reduce": lambda: comm.Allreduce(source, target),
            "reduce_scatter": lambda: comm.Reduce_scatter(source, target, counts),
            "all_gather": lambda: comm.Allgatherv(source, (target, counts)),
            "broadcast": lambda: comm.Bcast(target),
        }[verb]

    def prepare(self) -> None:
        """Poison the target, and fill the source."""
        self._target.fill_(_POISON)
        fill(self._source, self._contribution, self._send_start)

    def run(self) -> None:
        """Call MPI."""
        self._collective()

    def is_correct(self) -> bool:
        """Compare what this rank has received with the pattern."""
        return matches(self._target, self._total, self._receive_start)


def _cycle(index: Tensor, rank: int) -> Tensor:
    return (index + 13 * rank) % 5 - 2


def _pieces(part: Tensor, tile: Tensor, start: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ranges of the part that do not cross the end of a tile, and the tile's elements."""
    low = 0
    while low < part.numel():
        offset = (start + low) % _TILE
        high = min(part.numel(), low + _TILE - offset)
        yield low, high, tile[offset : offset + high - low]
        low = high
