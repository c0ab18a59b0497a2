"""Candidates that mntrain is compared with in collectives.py: a 16-bit wire, other libraries."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mntrain.bench.candidates import Candidate, Pattern, fill, matches
from mntrain.comm.collectives import WorldCollectives

_POISON = -9.0  # in no pattern: reveals elements that a collective has not written


class WireDtypeCollectives:
    """The sums of a world's collectives, with another dtype between nodes."""

    def __init__(self, collectives: WorldCollectives, wire: torch.dtype) -> None:
        self.rank, self.size, self.slot = collectives.rank, collectives.size, collectives.slot
        self.all_reduce = partial(collectives.all_reduce, wire=wire)
        self.reduce_scatter = partial(collectives.reduce_scatter, wire=wire)


class GlooCandidate(Candidate):
    """A collective of torch.distributed, on the gloo group of the same ranks.

    All shards have the same length: the tensor is padded to a multiple of the number of ranks.
    """

    def __init__(self, verb: str, comm: MPI.Intracomm, nbytes: int, pattern: Pattern) -> None:
        super().__init__("gloo")
        self._verb, self._pattern, self._is_root = verb, pattern, comm.rank == 0
        length = -(-(nbytes // 4) // comm.size)
        self._start = length * comm.rank
        self._whole, self._shard = torch.empty(length * comm.size), torch.empty(length)
        whole, shard = self._whole, self._shard
        self._collective = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, shard),
            "broadcast": lambda: dist.broadcast(whole, 0),
        }[verb]

    def prepare(self) -> None:
        """Write this rank's contribution, and poison the result."""
        if self._verb in ("all_reduce", "reduce_scatter"):
            fill(self._whole, self._pattern.contribution)
            self._shard.fill_(_POISON)
            return
        self._whole.fill_(_POISON)
        if self._verb == "all_gather":
            fill(self._shard, self._pattern.total, self._start)
        elif self._is_root:
            fill(self._whole, self._pattern.total)

    def run(self) -> None:
        """Call torch.distributed."""
        self._collective()

    def is_correct(self) -> bool:
        """Compare this rank's shard, or the whole tensor, with the pattern."""
        if self._verb == "reduce_scatter":
            return matches(self._shard, self._pattern.total, self._start)
        return matches(self._whole, self._pattern.total)


class HorovodCandidate(Candidate):
    """Horovod's all-reduce, in place. `hvd` is horovod.torch, initialized."""

    def __init__(self, hvd: Any, nbytes: int, pattern: Pattern) -> None:
        super().__init__("Horovod")
        self._pattern = pattern
        self._tensor = torch.empty(nbytes // 4)
        self._collective = partial(hvd.allreduce_, self._tensor, name=f"{nbytes} bytes", op=hvd.Sum)

    def prepare(self) -> None:
        """Write this rank's contribution."""
        fill(self._tensor, self._pattern.contribution)

    def run(self) -> None:
        """Call Horovod."""
        self._collective()

    def is_correct(self) -> bool:
        """Compare the tensor with the pattern."""
        return matches(self._tensor, self._pattern.total)
