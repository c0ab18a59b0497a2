"""Candidates that mntrain is compared with in collectives.py: a 16-bit wire, other libraries."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mntrain.bench.candidates import Candidate, Pattern, source_and_target
from mntrain.comm.world_collectives import WorldCollectives


class WireDtypeCollectives:
    """The sums of a world's collectives, with another dtype between nodes."""

    def __init__(self, collectives: WorldCollectives, wire: torch.dtype) -> None:
        self.rank, self.size, self.slot = collectives.rank, collectives.size, collectives.slot
        self.all_reduce = partial(collectives.all_reduce, wire=wire)
        self.reduce_scatter = partial(collectives.reduce_scatter, wire=wire)


def gloo_candidate(verb: str, comm: MPI.Intracomm, nbytes: int, pattern: Pattern) -> Candidate:
    """Return a collective of torch.distributed, on the gloo group of the same ranks.

    All shards have the same length: the tensor is padded to a multiple of the number of ranks.
    """
    length = -(-(nbytes // 4) // comm.size)
    whole, shard = torch.empty(length * comm.size), torch.empty(length)
    run = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }[verb]
    parts = source_and_target(verb, (whole, 0), (shard, length * comm.rank), is_root=comm.rank == 0)
    return Candidate("gloo", verb, pattern, run, *parts)


def horovod_candidate(hvd: Any, nbytes: int, pattern: Pattern) -> Candidate:
    """Return Horovod's all-reduce, in place. `hvd` is horovod.torch, initialized."""
    tensor = torch.empty(nbytes // 4)
    run = partial(hvd.allreduce_, tensor, name=f"{nbytes} bytes", op=hvd.Sum)
    return Candidate("Horovod", "all_reduce", pattern, run, (tensor, 0), (tensor, 0))
