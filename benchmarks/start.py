"""Compare the start of jobs over backend mntrain with those over gloo: whole jobs, in turns.

    python benchmarks/start.py [--ranks 1 2 4 8 16 32] [--turns 3]

A job imports torch, makes the process group, sums one number and ends: under mpirun over mntrain,
and under torchrun over gloo. Prints a table: the median seconds of a job, and seconds on rank 0
from before the import of the backend, or before init_process_group, to the end of the sum.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
SCRIPT = """
import sys, time
import torch, torch.distributed as dist
start = time.perf_counter()
if sys.argv[1] == "mntrain":
    import mntrain.torch_backend
dist.init_process_group(sys.argv[1])
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    print(time.perf_counter() - start)
dist.destroy_process_group()
"""


def measure(backend: str, ranks: int, script: Path) -> tuple[float, float]:
    """Return the seconds of a job, and those that rank 0 takes to start."""
    command = [str(BIN / "mpirun"), "-n", str(ranks), sys.executable]
    if backend == "gloo":
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        [*command, str(script), backend],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - start, float(done.stdout.split()[-1])


def main() -> None:
    """Measure every number of ranks, and print a row for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "start.py"
        script.write_text(SCRIPT)
        compare(script, options.ranks, options.turns)


def compare(script: Path, numbers: list[int], turns: int) -> None:
    """Print the table."""
    print("| ranks | mntrain, s (of rank 0) | gloo, s (of rank 0) |\n|--:|--:|--:|")
    for ranks in numbers:
        found: dict[str, list[tuple[float, float]]] = {"mntrain": [], "gloo": []}
        for _ in range(turns):
            for backend, samples in found.items():
                samples.append(measure(backend, ranks, script))
        cells = []
        for samples in found.values():
            whole, own = (statistics.median(column) for column in zip(*samples, strict=True))
            cells.append(f"{whole:.1f} ({own:.2f})")
        print(f"| {ranks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
