"""The rank script of collectives.py: time all candidates in turns, print one JSON object."""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from common import mpi_library, report, start_gloo, stop_gloo, versions
from mpi4py import MPI

import mntrain
from mntrain.bench.candidates import (
    Candidate,
    Pattern,
    library_candidate,
    rendezvous,
    source_and_target,
    take_turns,
)
from mntrain.comm import algorithms
from mntrain.comm.ticket import AlgorithmChoice
from mntrain.comm.world_collectives import WorldCollectives
from zero.layout import split

MIB = 2**20
ALGORITHMS = [name for name in algorithms.names() if name != "naive"]
NATIVE = {
    "all_reduce": "MPI_Allreduce",
    "reduce_scatter": "MPI_Reduce_scatter",
    "all_gather": "MPI_Allgather",
    "broadcast": "MPI_Bcast",
}
ROUNDS = (3, 20)  # fewest and most
COPY_S = 0.1


def main() -> None:
    """Measure all cases, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=float, nargs="*", default=[], help="for all_reduce")
    parser.add_argument("--other-mib", type=float, nargs="*", default=[])
    parser.add_argument("--verbs", nargs="+", choices=list(NATIVE), default=list(NATIVE))
    parser.add_argument("--peers", nargs="*", choices=["mpi", "gloo"], default=[])
    parser.add_argument("--case-s", type=float, default=6.0, help="of one verb and size")
    options = parser.parse_args()
    # Emulated nodes share the cores: idle OpenMP threads would delay those of other ranks.
    os.environ["OMP_NUM_THREADS"] = "1"  # or mntrain would set the number of threads
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()
    with mntrain.init(device="cpu") as world:
        natives = mpi_variants(comm) if "mpi" in options.peers else {}
        if "gloo" in options.peers:
            start_gloo(comm)
        rows, copies = [], []
        for mib in sorted({*options.mib, *options.other_mib}):
            nbytes = int(mib * MIB)
            memory = world.collectives.allocate(nbytes // 4, torch.float32, world.device)
            padded = torch.empty(nbytes // 4 + comm.size)  # as gloo needs it
            pattern = Pattern(comm.rank, comm.size, padded)
            if len(world.topology.nodes) == 1:
                copies.append({"mib": mib, **copy_seconds(comm, nbytes)})
            for verb in options.verbs:
                if mib in (options.mib if verb == "all_reduce" else options.other_mib):
                    candidates = library_candidates(world, verb, memory, pattern)
                    for suffix, other in natives.items():
                        candidates.append(mpi_candidate(verb, other, nbytes, pattern, suffix))
                    if "gloo" in options.peers:
                        candidates.append(gloo_candidate(verb, comm, nbytes, pattern))
                    rows += measure(comm, candidates, verb, mib, options.case_s)
            del memory, padded, pattern
        if "gloo" in options.peers:
            stop_gloo(comm)
        if world.master:
            about = {"library": mpi_library(), "versions": versions()}
            report({"topology": str(world.topology), **about, "copies": copies, "rows": rows})


def library_candidates(
    world: mntrain.World, verb: str, memory: torch.Tensor, pattern: Pattern
) -> list[Candidate]:
    """Return mntrain's candidates, all on the same tensor of `allocate`. Local."""
    variants: dict[str, WorldCollectives | Bf16Collectives] = {
        f"mntrain {name}": world.collectives.replace(choice=AlgorithmChoice(name))
        for name in ALGORITHMS
    }
    if verb in ("all_reduce", "reduce_scatter") and len(world.topology.nodes) > 1:
        variants["mntrain, bf16 wire"] = Bf16Collectives(world.collectives)
    return [library_candidate(name, verb, it, memory, pattern) for name, it in variants.items()]


class Bf16Collectives:
    """The sums of a world's collectives, with bf16 between nodes."""

    def __init__(self, collectives: WorldCollectives) -> None:
        self.rank, self.size, self.slot = collectives.rank, collectives.size, collectives.slot
        self.all_reduce = partial(collectives.all_reduce, wire=torch.bfloat16)
        self.reduce_scatter = partial(collectives.reduce_scatter, wire=torch.bfloat16)


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


def mpi_candidate(
    verb: str, comm: MPI.Intracomm, nbytes: int, pattern: Pattern, suffix: str
) -> Candidate:
    """Return a blocking collective of the MPI library, on fp32 in host memory. Local.

    Every collective except broadcast is out of place.
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
    return Candidate(NATIVE[verb] + suffix, verb, pattern, run, source, target)


def mpi_variants(comm: MPI.Intracomm) -> dict[str, MPI.Intracomm]:
    """Return the MPI library's variants: a communicator by the suffix of its name. Collective.

    Between nodes, Open MPI uses its hierarchical component `han` by default. Communicators can
    request others, so both are measured and named.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    several_nodes = comm.allreduce(node.size, MPI.MIN) < comm.size
    node.Free()
    if not mpi_library().startswith("Open MPI") or not several_nodes:
        return {"": comm}
    variants = {}
    for suffix, preference in ((", han", "han"), (", tuned", "^han")):
        info = MPI.Info.Create({"ompi_comm_coll_preference": preference})
        variants[suffix] = comm.Dup_with_info(info)
        info.Free()
    return variants


def measure(
    comm: MPI.Intracomm, candidates: Sequence[Candidate], verb: str, mib: float, case_s: float
) -> list[dict[str, Any]]:
    """Time candidates in turns, and return a row for each. Collective.

    A time is that of the slowest rank, and CPU seconds are the mean over ranks. A wrong result ends
    the job.
    """
    start = time.perf_counter()
    samples = take_turns(comm, candidates, 1, 0.0, warm_up=0)
    round_s = comm.allreduce(time.perf_counter() - start, MPI.MAX)
    if round_s > case_s:  # one more round, and the first one counts as well
        more = take_turns(comm, candidates, 1, 0.0, warm_up=0)
        samples = [one + two for one, two in zip(samples, more, strict=True)]
    else:
        fewest, most = ROUNDS
        rounds = max(fewest, min(most, int(case_s / round_s)))
        samples = take_turns(comm, candidates, rounds, float("inf"), warm_up=0)
    rows = []
    for candidate, turns in zip(candidates, samples, strict=True):
        assert all(it.correct for turn in turns for it in turn), f"{candidate.name}: wrong"
        times = [max(it.seconds for it in turn) for turn in turns]
        cpu = [statistics.fmean(it.cpu_s for it in turn) for turn in turns]
        row = {"verb": verb, "mib": mib, "what": candidate.name, "cpu_s": statistics.median(cpu)}
        rows.append({**row, "median_s": statistics.median(times), "times_s": times})
    return rows


def copy_speed(nbytes: int, seconds: float) -> float:
    """Return the speed of copies of `nbytes` bytes in host memory, in bytes/s. Local.

    Each byte counts once, though it is read and written. Called by all ranks of a node together, it
    measures each rank's share of their memory. Makes as many copies as fit into `seconds`, at
    least three, after a warm-up.
    """
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    target.copy_(source)
    copies, start = 0, time.perf_counter()
    while copies < 3 or time.perf_counter() - start < seconds:
        target.copy_(source)
        copies += 1
    return copies * nbytes / (time.perf_counter() - start)


def copy_seconds(comm: MPI.Intracomm, nbytes: int) -> dict[str, float]:
    """Return the seconds of a copy by all ranks at once, and by one rank while others sleep."""
    comm.Barrier()
    together = min(comm.allgather(copy_speed(nbytes, COPY_S)))
    alone = copy_speed(nbytes, COPY_S) if comm.rank == 0 else None
    rendezvous(comm)
    return {"together_s": nbytes / together, "alone_s": nbytes / comm.bcast(alone)}


if __name__ == "__main__":
    main()
