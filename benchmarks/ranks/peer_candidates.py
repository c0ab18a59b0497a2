"""Candidates that mntrain is compared with in collectives.py: a 16-bit wire, other libraries."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mntrain.bench.candidates import Candidate, Pattern, source_and_target
from mntrain.comm.world_collectives import WorldCollectives
from zero.layout import split

NATIVE = {
    "all_reduce": "MPI_Allreduce",
    "reduce_scatter": "MPI_Reduce_scatter",
    "all_gather": "MPI_Allgather",
    "broadcast": "MPI_Bcast",
}


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


def mpi_candidate(
    verb: str, comm: Any, nbytes: int, pattern: Pattern, name: str | None = None
) -> Candidate:
    """Return a blocking collective of the MPI library, on fp32 in host memory. Local.

    `comm` is an mpi4py communicator over the world that carries nothing else. `pattern` is fp32 on
    the CPU. Every collective except broadcast is out of place.
    """
    bounds = split(nbytes // 4, comm.size)
    counts = [high - low for low, high in pairwise(bounds)]
    whole = torch.empty(bounds[-1]), 0
    shard = torch.empty(counts[comm.rank]), bounds[comm.rank]
    source, target = source_and_target(verb, whole, shard, is_root=comm.rank == 0)
    if verb == "all_reduce":
        source = torch.empty(bounds[-1]), 0
    sent, received = source[0].numpy(), target[0].numpy()
    run: Callable[[], Any] = {
        "all_reduce": lambda: comm.Allreduce(sent, received),
        "reduce_scatter": lambda: comm.Reduce_scatter(sent, received, counts),
        "all_gather": lambda: comm.Allgatherv(sent, (received, counts)),
        "broadcast": lambda: comm.Bcast(received),
    }[verb]
    return Candidate(name or NATIVE[verb], verb, pattern, run, source, target)
