"""What is measured: this project's verbs by one algorithm, and the MPI library's own."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mntrain.bench.pattern import Pattern, holds, write
from mntrain.comm.collectives import WorldCollectives
from zero.layout import split

_WRONG = -9.0  # in no pattern: what a verb leaves untouched is seen
NATIVE = {
    "all_reduce": "MPI_Allreduce",
    "reduce_scatter": "MPI_Reduce_scatter",
    "all_gather": "MPI_Allgather",
    "broadcast": "MPI_Bcast",
}


class Candidate(ABC):
    """One way to do one verb, on a tensor of one size: prepared, run and checked by turns."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def prepare(self) -> None:
        """Put this rank's contribution into place. Local."""

    @abstractmethod
    def run(self) -> None:
        """Do the verb, and return when this rank has its result. Collective. This is timed."""

    @abstractmethod
    def right(self) -> bool:
        """Whether this rank has what it should have, to the bit. Local."""


class LibraryCandidate(Candidate):
    """A verb of `WorldCollectives`, in place on a flat tensor that is lent from case to case."""

    def __init__(
        self, name: str, verb: str, collectives: WorldCollectives, tensor: Tensor, pattern: Pattern
    ) -> None:
        super().__init__(name)
        self._verb, self._tensor, self._pattern = verb, tensor, pattern
        self._do: Callable[[Tensor], Any] = getattr(collectives, verb)
        slot, bounds = collectives.slot(collectives.rank), split(tensor.numel(), collectives.size)
        self._start = bounds[slot]
        self._shard = tensor[bounds[slot] : bounds[slot + 1]]
        self._is_root = collectives.rank == 0

    def prepare(self) -> None:
        """See `Candidate.prepare`."""
        if self._verb in ("all_reduce", "reduce_scatter"):
            write(self._tensor, self._pattern.mine)
        else:
            self._tensor.fill_(_WRONG)
        if self._verb == "all_gather":
            write(self._shard, self._pattern.total, self._start)
        elif self._verb == "broadcast" and self._is_root:
            write(self._tensor, self._pattern.total)
        if self._tensor.is_cuda:  # that is not to be timed
            torch.cuda.synchronize(self._tensor.device)

    def run(self) -> None:
        """See `Candidate.run`."""
        self._do(self._tensor).wait()
        if self._tensor.is_cuda:  # the result is ordered by the stream: wait for that, too
            torch.cuda.current_stream(self._tensor.device).synchronize()

    def right(self) -> bool:
        """See `Candidate.right`."""
        if self._verb == "reduce_scatter":
            return holds(self._shard, self._pattern.total, self._start)
        return holds(self._tensor, self._pattern.total)


class MpiCandidate(Candidate):
    """A verb of the MPI library: blocking, on fp32 in host memory, from one buffer to another.

    `comm` is an mpi4py communicator over the world, on which nothing else is under way. `pattern`
    is of fp32, on the CPU.
    """

    def __init__(self, verb: str, comm: Any, nbytes: int, pattern: Pattern) -> None:
        super().__init__(NATIVE[verb])
        self._pattern = pattern
        bounds = split(nbytes // pattern.mine.element_size(), comm.size)
        counts = [high - low for low, high in pairwise(bounds)]
        # The parts of the tensor that a rank gives and gets: elements from, to.
        whole, shard = (0, bounds[-1]), (bounds[comm.rank], bounds[comm.rank + 1])
        gives = {"all_gather": shard, "broadcast": whole if comm.rank == 0 else (0, 0)}
        self._gives = gives.get(verb, whole)
        self._gets = shard if verb == "reduce_scatter" else whole
        given = self._gives[1] - self._gives[0]
        self._target = torch.empty(self._gets[1] - self._gets[0])
        # A broadcast has one buffer; of it the root alone gives anything.
        self._source = self._target[:given] if verb == "broadcast" else torch.empty(given)
        reduces = verb in ("all_reduce", "reduce_scatter")
        self._given = pattern.mine if reduces else pattern.total
        source, target = self._source.numpy(), self._target.numpy()
        self._do: Callable[[], Any] = {
            "all_reduce": lambda: comm.Allreduce(source, target),
            "reduce_scatter": lambda: comm.Reduce_scatter(source, target, counts),
            "all_gather": lambda: comm.Allgatherv(source, (target, counts)),
            "broadcast": lambda: comm.Bcast(target),
        }[verb]

    def prepare(self) -> None:
        """See `Candidate.prepare`."""
        self._target.fill_(_WRONG)
        write(self._source, self._given, self._gives[0])

    def run(self) -> None:
        """See `Candidate.run`."""
        self._do()

    def right(self) -> bool:
        """See `Candidate.right`."""
        return holds(self._target, self._pattern.total, self._gets[0])
