"""The ranks' part of all_reduce.py: time the all-reduces of one world, print one JSON object."""

import argparse
import json
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from mpi4py import MPI

import mntrain
from mntrain.collectives import ALGORITHMS

MIB = 2**20


def main() -> None:
    """Time every candidate at every size, in turn, so that noise falls on all alike."""
    options = argparse.ArgumentParser()
    options.add_argument("--mib", type=float, nargs="+", default=[1, 16, 64])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--ranks-per-node", type=int)
    given = options.parse_args()
    results = []
    for mib in given.mib:
        numel = int(mib * MIB) // 4
        seconds: dict[str, list[float]] = {}
        for name, call, result in candidates(numel, given.ranks_per_node):
            for repeat in range(given.repeats + 1):
                result.fill_(1.0)
                took = timed(call)
                if repeat:  # the first one warms up
                    seconds.setdefault(name, []).append(took)
                check(name, result)
        results += [
            {"mib": mib, "what": name, "median_s": statistics.median(times), "all_s": times}
            for name, times in seconds.items()
        ]
    with mntrain.init(ranks_per_node=given.ranks_per_node) as world:
        if world.master:
            print(
                json.dumps(
                    {
                        "topology": str(world.topology),
                        "library": world.library.name,
                        "torch": torch.__version__,
                        "python": platform.python_version(),
                        "mntrain": mntrain.__version__,
                        "results": results,
                    }
                )
            )


def candidates(
    numel: int, ranks_per_node: int | None
) -> Iterator[tuple[str, Callable[[], object], torch.Tensor]]:
    """Each way to all-reduce: its name, the call, and the fp32 tensor that it sums in place."""
    tensor = torch.ones(numel)
    for algorithm in ALGORITHMS:
        with mntrain.init(algorithm=algorithm, ranks_per_node=ranks_per_node) as world:
            yield algorithm, lambda w=world: w.collectives.all_reduce(tensor).wait(), tensor
    array = tensor.numpy()
    yield "MPI_Allreduce", lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array), tensor
    if dist.is_gloo_available():
        start_gloo(MPI.COMM_WORLD)
        yield "gloo", lambda: dist.all_reduce(tensor), tensor
        dist.destroy_process_group()


def start_gloo(comm) -> None:
    """Make torch.distributed's gloo group of the same ranks, over the same link."""
    mine = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            host = socket.gethostbyname(socket.gethostname())
            mine = f"tcp://{host}:{free.getsockname()[1]}"
    dist.init_process_group("gloo", comm.bcast(mine), rank=comm.rank, world_size=comm.size)


def timed(call: Callable[[], object]) -> float:
    """Seconds from when all ranks are ready until the last is done."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    call()
    return MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)


def check(name: str, result: torch.Tensor) -> None:
    """A wrong sum has no speed."""
    assert bool((result == MPI.COMM_WORLD.size).all()), f"{name} gave a wrong sum"


if __name__ == "__main__":
    main()
