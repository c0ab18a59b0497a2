"""The ranks' part of gpu.py: all-reduce of device memory by every transport, beside copies."""

import argparse
import time
from contextlib import ExitStack
from typing import Any

import torch
from collectives import measure
from common import mpi_library, report
from gpu_facts import facts
from mpi4py import MPI
from torch import Tensor

import mntrain
from mntrain import AgreedError
from mntrain.bench.candidates import Pattern, library_candidate, rendezvous

MIB = 2**20
TRANSPORTS = ("host", "cuda-aware", "nccl")
PIECE = 32 * MIB  # of the copies that show the limit
COPIES = 3


def main() -> None:
    """Measure all sizes, and report."""
    options = argparse.ArgumentParser()
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--mib", type=float, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    options.add_argument("--case-s", type=float, default=4.0, help="for one size, all transports")
    given = options.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    with ExitStack() as stack:
        worlds, absent = open_worlds(given.device, stack)
        first = next(iter(worlds.values()))
        rows: list[dict[str, Any]] = []
        copies: list[dict[str, float]] = []
        for mib in given.mib:
            numel = int(mib * MIB) // 4
            memory = first.collectives.allocate(numel, torch.float32, first.device)
            pattern = Pattern(comm.rank, comm.size, torch.float32, first.device)
            candidates = [
                library_candidate(name, "all_reduce", world.collectives, memory, pattern)
                for name, world in worlds.items()
            ]
            copies.append({"mib": mib, "seconds": copy_seconds(comm, memory)})
            rows += measure(comm, candidates, "all_reduce", mib, given.case_s)
            del memory, candidates
        if comm.rank == 0:
            report(
                {
                    **facts(first.device),
                    "ranks": comm.size,
                    "places": [place.device for place in first.places],
                    "library": mpi_library(),
                    "absent": absent,
                    "copies": copies,
                    "rows": rows,
                }
            )
    comm.Free()


def open_worlds(device: str, stack: ExitStack) -> tuple[dict[str, mntrain.World], dict[str, str]]:
    """A world by every transport that works here; and why the others do not. Collective."""
    if device == "cpu":
        return {"shared memory": stack.enter_context(mntrain.init(device="cpu"))}, {}
    worlds, absent = {}, {}
    for name in TRANSPORTS:
        try:
            world = mntrain.init(device="cuda", transport=name)
        except AgreedError as error:
            absent[name] = str(error)
        else:
            worlds[name] = stack.enter_context(world)
    return worlds, absent


def copy_seconds(comm: MPI.Intracomm, memory: Tensor) -> float:
    """Return the time that all ranks at once need to copy the tensor to the host. Collective.

    As much is copied back at the same time, from and to pinned memory. Of the slowest rank; the
    best of a few.
    """
    host = [pinned(memory, min(memory.nbytes, PIECE)) for _ in range(2)]
    took = []
    for _ in range(COPIES):
        rendezvous(comm)
        start = time.perf_counter()
        copy_both_ways(memory, *host)
        took.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return min(took)


def pinned(memory: Tensor, nbytes: int) -> Tensor:
    """A buffer in host memory for pieces of a tensor."""
    return torch.empty(nbytes // 4, dtype=memory.dtype, pin_memory=memory.is_cuda)


def copy_both_ways(memory: Tensor, down: Tensor, up: Tensor) -> None:
    """Copy as many bytes as a tensor has from the device, and as many to it."""
    pieces = memory.split(down.numel())
    if not memory.is_cuda:
        for piece in pieces:
            down[: piece.numel()].copy_(piece)
            piece.copy_(up[: piece.numel()])
        return
    for buffer, out in ((down, True), (up, False)):
        with torch.cuda.stream(torch.cuda.Stream(memory.device)):
            for piece in pieces:
                part = buffer[: piece.numel()]
                target, source = (part, piece) if out else (piece, part)
                target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(memory.device)


if __name__ == "__main__":
    main()
