"""The ranks' part of collectives.py: time every candidate in turn, print one JSON object."""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from candidates import Gloo, Horovod, Library, Wired
from common import (
    AbsentError,
    mpi_library,
    report,
    start_gloo,
    start_horovod,
    stop_gloo,
    versions,
)
from mpi4py import MPI

import mntrain
from mntrain.bench.candidates import NATIVE, Candidate, LibraryCandidate
from mntrain.bench.pattern import Pattern
from mntrain.bench.timing import in_turns, rendezvous, sample
from mntrain.comm import algorithms, link_speed
from mntrain.comm.algorithm_table import AlgorithmTable
from mntrain.comm.collectives import WorldCollectives

MIB = 2**20
ALGORITHMS = algorithms.candidates()
WIRED = ("all_reduce", "reduce_scatter")
CASE_S = 6.0  # a verb at one size, all candidates: as many rounds as fit,
ROUNDS = (3, 20)  # within these bounds;
LONG_ROUNDS = 2  # where already one takes longer than CASE_S, so many, of which none is to warm up
COPY_S = 0.1


def main() -> None:
    """Measure all cases, and report."""
    options = argparse.ArgumentParser()
    options.add_argument("--mib", type=float, nargs="*", default=[], help="for all_reduce")
    options.add_argument("--other-mib", type=float, nargs="*", default=[])
    options.add_argument("--verbs", nargs="+", choices=list(NATIVE), default=list(NATIVE))
    options.add_argument("--peers", nargs="*", default=[])
    options.add_argument("--case-s", type=float, default=CASE_S)
    given = options.parse_args()
    # All emulated nodes share the cores: threads with nothing to do would wait on those of others.
    os.environ["OMP_NUM_THREADS"] = "1"  # or mntrain would count the cores
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()
    with ExitStack() as stack:
        world = stack.enter_context(mntrain.init(device="cpu"))
        peers = Peers(given.peers, comm, stack)
        rows, copies = [], []
        sizes = sorted({*given.mib, *given.other_mib})
        for mib in sizes:
            nbytes = int(mib * MIB)
            memory = world.collectives.allocate(nbytes // 4, torch.float32, world.device)
            if len(world.topology.nodes) == 1:
                copies.append({"mib": mib, **copy_seconds(comm, nbytes)})
            for verb in given.verbs:
                if mib in (given.mib if verb == "all_reduce" else given.other_mib):
                    candidates = ours(world, verb, memory) + peers.of(verb, nbytes)
                    rows += measure(comm, candidates, verb, mib, given.case_s)
            del memory
        if world.master:
            report(
                {
                    "topology": str(world.topology),
                    "library": mpi_library(),
                    "versions": versions(["horovod"]),
                    "auto": world.tuning,
                    "absent": peers.absent,
                    "copies": copies,
                    "rows": rows,
                }
            )
    comm.Free()


def ours(world: mntrain.World, verb: str, memory: torch.Tensor) -> list[Candidate]:
    """This project's ways, all on memory of `allocate`. Local."""
    pattern = Pattern(world.rank, world.size, torch.float32, world.device)

    def way(name: str, collectives: WorldCollectives) -> Candidate:
        return LibraryCandidate(f"mntrain{name}", verb, collectives, memory, pattern)

    ways = [way("", world.collectives)]
    ways += [
        way(f" {name}", world.collectives.replace(table=AlgorithmTable.always(name)))
        for name in ALGORITHMS
    ]
    if verb in WIRED and len(world.topology.nodes) > 1:
        ways.append(way(", bf16 wire", Wired(world.collectives, torch.bfloat16)))
    return ways


class Peers:
    """The other libraries of this job. Construction is collective; `absent` says who is not here.

    `stack` ends what has to be ended.
    """

    def __init__(self, wanted: Sequence[str], comm: MPI.Intracomm, stack: ExitStack) -> None:
        self.absent: dict[str, str] = {}
        self._pattern = Pattern(comm.rank, comm.size, torch.float32, torch.device("cpu"))
        self._makers: list[Callable[[str, int], Candidate | None]] = []
        if "mpi" in wanted:
            for name, chosen in libraries(comm):
                if chosen is not comm:
                    stack.callback(chosen.Free)
                self._makers.append(
                    lambda verb, nbytes, name=name, chosen=chosen: Library(
                        name.format(NATIVE[verb]), verb, chosen, nbytes, self._pattern
                    )
                )
        if "gloo" in wanted:
            start_gloo(comm)
            stack.callback(stop_gloo, comm)
            self._makers.append(lambda verb, nbytes: Gloo(verb, comm, nbytes, self._pattern))
        if "horovod" in wanted:
            try:
                hvd = start_horovod()
            except AbsentError as reason:
                self.absent["Horovod"] = str(reason)
            else:
                stack.callback(hvd.shutdown)
                self._makers.append(
                    lambda verb, nbytes: (
                        Horovod(hvd, nbytes, self._pattern) if verb == "all_reduce" else None
                    )
                )

    def of(self, verb: str, nbytes: int) -> list[Candidate]:
        """Those that have the verb. Local."""
        made = [make(verb, nbytes) for make in self._makers]
        return [candidate for candidate in made if candidate is not None]


def libraries(comm: MPI.Intracomm) -> list[tuple[str, MPI.Intracomm]]:
    """The MPI library's own ways: what to call them, and on which communicator. Collective.

    Between nodes Open MPI takes its hierarchical `han`, unless a communicator asks for others; it
    is asked for both, so that each row says what it is.
    """
    several = comm.Split_type(MPI.COMM_TYPE_SHARED)
    spread = comm.allreduce(several.size, MPI.MIN) < comm.size
    several.Free()
    if not mpi_library().startswith("Open MPI") or not spread:
        return [("{}", comm)]
    ways = []
    for name, preference in (("{}, han", "han"), ("{}, tuned", "^han")):
        info = MPI.Info.Create({"ompi_comm_coll_preference": preference})
        ways.append((name, comm.Dup_with_info(info)))
        info.Free()
    return ways


def measure(
    comm: MPI.Intracomm, candidates: Sequence[Candidate], verb: str, mib: float, case_s: float
) -> list[dict[str, Any]]:
    """Time candidates in turn, so that noise falls on all alike: a row for each. Collective.

    A time is that of the slowest rank.
    """
    start = time.perf_counter()
    first = [timed(comm, candidate) for candidate in candidates]
    round_s = comm.allreduce(time.perf_counter() - start, MPI.MAX)
    long = round_s > case_s
    times = [[took] if long else [] for took in first]
    rounds = LONG_ROUNDS - 1 if long else max(ROUNDS[0], min(ROUNDS[1], int(case_s / round_s)))
    for turn in range(rounds):
        for index in in_turns(len(candidates), turn):
            times[index].append(timed(comm, candidates[index]))
    by_rank = comm.allgather(times)
    times = [list(map(max, zip(*ranks, strict=True))) for ranks in zip(*by_rank, strict=True)]
    return [
        {
            "verb": verb,
            "mib": mib,
            "what": candidate.name,
            "median_s": statistics.median(took),
            "times_s": took,
        }
        for candidate, took in zip(candidates, times, strict=True)
    ]


def timed(comm: MPI.Intracomm, candidate: Candidate) -> float:
    """Do it once: seconds on this rank. A wrong result has no speed: it ends the job."""
    took, right = sample(comm, candidate)
    assert right, f"{candidate.name} gave a wrong result on rank {comm.rank}"
    return took


def copy_seconds(comm: MPI.Intracomm, nbytes: int) -> dict[str, float]:
    """What a copy of so many bytes takes: of all ranks at once, and of one while others sleep."""
    comm.Barrier()
    together = min(comm.allgather(link_speed.copy_speed(nbytes, COPY_S)))
    alone = link_speed.copy_speed(nbytes, COPY_S) if comm.rank == 0 else None
    rendezvous(comm)
    return {"together_s": nbytes / together, "alone_s": nbytes / comm.bcast(alone)}


if __name__ == "__main__":
    main()
