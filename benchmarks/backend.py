"""Compare all-reduce of backend mntrain with gloo's, in turns in one job.

    mpirun -np 2 python benchmarks/backend.py
    sudo python tests/cluster/nodes.py --ranks 2,2 --link 1gbit -- python benchmarks/backend.py
    mpirun -np 2 python benchmarks/backend.py cuda

Prints a table: the median milliseconds of a call on rank 0, and those of the CPU in all threads.
With `cuda`, tensors lie on this rank's GPU, which is waited for.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist

import mntrain.torch_backend  # noqa: F401 - registers the backend

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
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        for _ in range(TURNS):
            for name, group in groups.items():
                dist.all_reduce(tensor.fill_(1), group=group)
                for _ in range(max(1, min(MOST_CALLS, BYTES // nbytes))):
                    tensor.fill_(1)
                    synchronize()
                    start, start_cpu = time.perf_counter(), time.process_time()
                    dist.all_reduce(tensor, group=group)
                    synchronize()
                    took = time.perf_counter() - start, time.process_time() - start_cpu
                    samples[name].append(took)
        medians = {
            name: [1e3 * statistics.median(column) for column in zip(*found, strict=True)]
            for name, found in samples.items()
        }
        cells = [f"{wall:.3g} ({cpu:.3g})" for wall, cpu in medians.values()]
        show(nbytes, *cells, f"{medians['gloo'][0] / medians['mntrain'][0]:.2f}")
    dist.destroy_process_group()


def show(*cells: object) -> None:
    """Print a row of a table, on rank 0."""
    if dist.get_rank() == 0:
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
