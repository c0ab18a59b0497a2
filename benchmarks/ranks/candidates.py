"""Ways to do a collective, besides this project's as it comes: its 16-bit wire, and the peers."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mntrain.bench.candidates import Candidate, MpiCandidate
from mntrain.bench.pattern import Pattern, holds, write
from mntrain.comm.collectives import WorldCollectives

_WRONG = -9.0  # in no pattern: what a verb leaves untouched is seen


class Wired:
    """The sums of a world's collectives, travelling in another dtype between nodes."""

    def __init__(self, collectives: WorldCollectives, wire: torch.dtype) -> None:
        self.rank, self.size, self.slot = collectives.rank, collectives.size, collectives.slot
        self.all_reduce = partial(collectives.all_reduce, wire=wire)
        self.reduce_scatter = partial(collectives.reduce_scatter, wire=wire)


class Library(MpiCandidate):
    """The MPI library's own, by another name where it has several ways."""

    def __init__(
        self, name: str, verb: str, comm: MPI.Intracomm, nbytes: int, pattern: Pattern
    ) -> None:
        super().__init__(verb, comm, nbytes, pattern)
        self.name = name


class Gloo(Candidate):
    """torch.distributed's verb, on the gloo group of the same ranks.

    Shards are equal here: the tensor is longer by a few elements where it does not divide.
    """

    def __init__(self, verb: str, comm: MPI.Intracomm, nbytes: int, pattern: Pattern) -> None:
        super().__init__("gloo")
        self._verb, self._pattern, self._is_root = verb, pattern, comm.rank == 0
        length = -(-(nbytes // 4) // comm.size)
        self._start = length * comm.rank
        self._whole, self._shard = torch.empty(length * comm.size), torch.empty(length)
        whole, shard = self._whole, self._shard
        self._do = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, shard),
            "broadcast": lambda: dist.broadcast(whole, 0),
        }[verb]

    def prepare(self) -> None:
        """See `Candidate.prepare`."""
        if self._verb in ("all_reduce", "reduce_scatter"):
            write(self._whole, self._pattern.mine)
            self._shard.fill_(_WRONG)
            return
        self._whole.fill_(_WRONG)
        if self._verb == "all_gather":
            write(self._shard, self._pattern.total, self._start)
        elif self._is_root:
            write(self._whole, self._pattern.total)

    def run(self) -> None:
        """See `Candidate.run`."""
        self._do()

    def right(self) -> bool:
        """See `Candidate.right`."""
        if self._verb == "reduce_scatter":
            return holds(self._shard, self._pattern.total, self._start)
        return holds(self._whole, self._pattern.total)


class Horovod(Candidate):
    """Horovod's all-reduce, in place. `hvd` is horovod.torch, started."""

    def __init__(self, hvd: Any, nbytes: int, pattern: Pattern) -> None:
        super().__init__("Horovod")
        self._pattern = pattern
        self._tensor = torch.empty(nbytes // 4)
        self._do = partial(hvd.allreduce_, self._tensor, name=f"{nbytes} bytes", op=hvd.Sum)

    def prepare(self) -> None:
        """See `Candidate.prepare`."""
        write(self._tensor, self._pattern.mine)

    def run(self) -> None:
        """See `Candidate.run`."""
        self._do()

    def right(self) -> bool:
        """See `Candidate.right`."""
        return holds(self._tensor, self._pattern.total)
