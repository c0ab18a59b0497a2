"""Compare backend mntrain with gloo, in turns in one job.

    mpirun -np 2 python benchmarks/backend.py
    sudo python tests/cluster/nodes.py --ranks 2,2 --link 1gbit -- python benchmarks/backend.py
    mpirun -np 2 python benchmarks/backend.py cuda

Prints a table of all-reduces and one of what costs mostly CPU: the median milliseconds of a call on
rank 0, and those of the CPU in all threads. With `cuda`, tensors lie on this rank's GPU, which is
waited for, and the second table is left out.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mntrain.torch_backend  # noqa: F401 - registers the backend

Group = dist.ProcessGroup | None
Call = Callable[[Group], None]

SIZES = [64, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
TURNS, MOST_CALLS, BYTES = 4, 50, 64 << 20


def main() -> None:
    """Measure every size, and print a row for each."""
    torch.set_num_threads(1)
    dist.init_process_group("mntrain")
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    groups = {"mntrain": None, "gloo": dist.new_group(backend="gloo")}
    show("bytes", *[f"{name}, ms (CPU)" for name in groups], "gloo / mntrain")
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4, device=device)

        def all_reduce(group: Group, tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor.fill_(1), group=group)
            synchronize()

        compare(str(nbytes), dict.fromkeys(groups, all_reduce), groups, BYTES // nbytes)
    if device == "cpu":
        for what, make in SMALL.items():
            calls = {name: make(group) for name, group in groups.items()}
            compare(what, calls, groups, MOST_CALLS)
    dist.destroy_process_group()


def compare(what: str, calls: Mapping[str, Call], groups: Mapping[str, Group], count: int) -> None:
    """Time a call of each group in turns, and print the row."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
    for _ in range(TURNS):
        for name, group in groups.items():
            calls[name](group)
            for _ in range(max(1, min(MOST_CALLS, count))):
                start, start_cpu = time.perf_counter(), time.process_time()
                calls[name](group)
                took = time.perf_counter() - start, time.process_time() - start_cpu
                samples[name].append(took)
    medians = {
        name: [1e3 * statistics.median(column) for column in zip(*found, strict=True)]
        for name, found in samples.items()
    }
    cells = [f"{wall:.3g} ({cpu:.3g})" for wall, cpu in medians.values()]
    show(what, *cells, f"{medians['gloo'][0] / medians['mntrain'][0]:.2f}")


def ddp_step(layers: int, bucket_mb: float, group: Group) -> Call:
    """Return a step of DDP with so many small layers."""
    model = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(layers)]),
        process_group=group,
        bucket_cap_mb=bucket_mb,
    )
    batch = torch.ones(4, 64)

    def step(_: Group) -> None:
        model.zero_grad()
        model(batch).sum().backward()

    return step


def ping_pong(group: Group) -> Call:
    """Return a message of 100 floats from rank 0 to rank 1 and back."""
    tensor, rank = torch.ones(100), dist.get_rank()

    def both_ways(_: Group) -> None:
        if rank < 2:
            for one_way in (dist.send, dist.recv)[:: 1 - 2 * rank]:
                one_way(tensor, 1 - rank, group=group)

    return both_ways


def new_group(group: Group) -> Call:
    """Return the making of a group of all ranks."""
    backend = "mntrain" if group is None else "gloo"

    def make(_: Group) -> None:
        dist.new_group(backend=backend)

    return make


SMALL: dict[str, Callable[[Group], Call]] = {
    "a step of DDP with a layer": partial(ddp_step, 1, 25),
    "a step of DDP with 40 buckets of 16 KiB": partial(ddp_step, 40, 0.01),
    "400 bytes to another rank and back": ping_pong,
    "a new group": new_group,
}


def show(*cells: object) -> None:
    """Print a row of a table, on rank 0."""
    if dist.get_rank() == 0:
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
