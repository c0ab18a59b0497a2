"""The rank script of collectives.py: time all candidates in turns, print one JSON object."""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from common import AbsentError, mpi_library, report, start_gloo, start_horovod, stop_gloo, versions
from mpi4py import MPI
from peer_candidates import (
    NATIVE,
    WireDtypeCollectives,
    gloo_candidate,
    horovod_candidate,
    mpi_candidate,
)

import mntrain
from mntrain.bench.candidates import (
    Candidate,
    Pattern,
    library_candidate,
    rendezvous,
    take_turns,
)
from mntrain.bench.hardware_limits import copy_speed
from mntrain.comm import algorithms
from mntrain.comm.algorithms import AlgorithmChoice
from mntrain.comm.world_collectives import WorldCollectives

MIB = 2**20
ALGORITHMS = [name for name in algorithms.names() if name != "naive"]
SUMS = ("all_reduce", "reduce_scatter")
CASE_S = 6.0  # for one collective at one size, all candidates together
ROUNDS = (3, 20)  # fewest and most
COPY_S = 0.1


def main() -> None:
    """Measure all cases, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=float, nargs="*", default=[], help="for all_reduce")
    parser.add_argument("--other-mib", type=float, nargs="*", default=[])
    parser.add_argument("--verbs", nargs="+", choices=list(NATIVE), default=list(NATIVE))
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--case-s", type=float, default=CASE_S)
    options = parser.parse_args()
    # Emulated nodes share the cores: idle OpenMP threads would delay those of other ranks.
    os.environ["OMP_NUM_THREADS"] = "1"  # or mntrain would set the number of threads
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()
    with ExitStack() as stack:
        world = stack.enter_context(mntrain.init(device="cpu"))
        peers = Peers(options.peers, comm, stack)
        rows, copies = [], []
        for mib in sorted({*options.mib, *options.other_mib}):
            nbytes = int(mib * MIB)
            memory = world.collectives.allocate(nbytes // 4, torch.float32, world.device)
            if len(world.topology.nodes) == 1:
                copies.append({"mib": mib, **copy_seconds(comm, nbytes)})
            for verb in options.verbs:
                if mib in (options.mib if verb == "all_reduce" else options.other_mib):
                    candidates = library_candidates(world, verb, memory) + peers.of(verb, nbytes)
                    rows += measure(comm, candidates, verb, mib, options.case_s)
            del memory
        if world.master:
            report(
                {
                    "topology": str(world.topology),
                    "library": mpi_library(),
                    "versions": versions(["horovod"]),
                    "absent": peers.absent,
                    "copies": copies,
                    "rows": rows,
                }
            )
    comm.Free()


def library_candidates(world: mntrain.World, verb: str, memory: torch.Tensor) -> list[Candidate]:
    """Return mntrain's candidates, all on the same tensor of `allocate`. Local."""
    pattern = Pattern(world.rank, world.size, torch.float32, world.device)
    variants: dict[str, WorldCollectives | WireDtypeCollectives] = {
        f"mntrain {name}": world.collectives.replace(choice=AlgorithmChoice(name))
        for name in ALGORITHMS
    }
    if verb in SUMS and len(world.topology.nodes) > 1:
        variants["mntrain, bf16 wire"] = WireDtypeCollectives(world.collectives, torch.bfloat16)
    return [library_candidate(name, verb, it, memory, pattern) for name, it in variants.items()]


class Peers:
    """The other libraries of this job. Construction is collective.

    `absent` maps the missing ones to the reason. `stack` shuts them down.
    """

    def __init__(self, wanted: Sequence[str], comm: MPI.Intracomm, stack: ExitStack) -> None:
        self.absent: dict[str, str] = {}
        self._pattern = Pattern(comm.rank, comm.size, torch.float32, torch.device("cpu"))
        self._makers: list[Callable[[str, int], Candidate | None]] = []
        if "mpi" in wanted:
            for suffix, variant in mpi_variants(comm):
                if variant is not comm:
                    stack.callback(variant.Free)
                self._makers.append(
                    lambda verb, nbytes, suffix=suffix, variant=variant: mpi_candidate(
                        verb, variant, nbytes, self._pattern, NATIVE[verb] + suffix
                    )
                )
        if "gloo" in wanted:
            start_gloo(comm)
            stack.callback(stop_gloo, comm)
            self._makers.append(
                lambda verb, nbytes: gloo_candidate(verb, comm, nbytes, self._pattern)
            )
        if "horovod" in wanted:
            try:
                hvd = start_horovod()
            except AbsentError as reason:
                self.absent["Horovod"] = str(reason)
            else:
                stack.callback(hvd.shutdown)
                self._makers.append(
                    lambda verb, nbytes: (
                        horovod_candidate(hvd, nbytes, self._pattern)
                        if verb == "all_reduce"
                        else None
                    )
                )

    def of(self, verb: str, nbytes: int) -> list[Candidate]:
        """Return the candidates that implement a collective. Local."""
        made = [make(verb, nbytes) for make in self._makers]
        return [candidate for candidate in made if candidate is not None]


def mpi_variants(comm: MPI.Intracomm) -> list[tuple[str, MPI.Intracomm]]:
    """Return the MPI library's variants: a suffix for the name, and a communicator. Collective.

    Between nodes, Open MPI uses its hierarchical component `han` by default. Communicators can
    request others, so both are measured and named.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    several_nodes = comm.allreduce(node.size, MPI.MIN) < comm.size
    node.Free()
    if not mpi_library().startswith("Open MPI") or not several_nodes:
        return [("", comm)]
    variants = []
    for suffix, preference in ((", han", "han"), (", tuned", "^han")):
        info = MPI.Info.Create({"ompi_comm_coll_preference": preference})
        variants.append((suffix, comm.Dup_with_info(info)))
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


def copy_seconds(comm: MPI.Intracomm, nbytes: int) -> dict[str, float]:
    """Return the seconds of a copy by all ranks at once, and by one rank while others sleep."""
    comm.Barrier()
    together = min(comm.allgather(copy_speed(nbytes, COPY_S)))
    alone = copy_speed(nbytes, COPY_S) if comm.rank == 0 else None
    rendezvous(comm)
    return {"together_s": nbytes / together, "alone_s": nbytes / comm.bcast(alone)}


if __name__ == "__main__":
    main()
