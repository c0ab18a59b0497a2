"""Compare the start of jobs over backend mntrain with those over gloo: whole jobs, in turns.

    python benchmarks/start.py [--ranks 1 2 4 8 16 32] [--turns 3]

A job imports torch, makes the process group, sums one number and ends: under mpirun over mntrain,
and under torchrun over gloo. Prints a table: the median seconds of a job, and seconds on rank 0
from before the import of the backend, or before init_process_group, to the end of the sum.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from emulated import mpirun_words, output_of
from results import table

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


def main() -> None:
    """Measure every number of ranks, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "start.py"
        script.write_text(SCRIPT)
        for ranks in options.ranks:
            torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
            launchers = {"mntrain": [*mpirun_words(ranks), sys.executable]}
            launchers["gloo"] = [sys.executable, *torchrun]
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in launchers}
            for _ in range(options.turns):
                for backend, words in launchers.items():
                    start = time.perf_counter()
                    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                    output = output_of([*words, str(script), backend], environment, 600)
                    own_s = float(output.split()[-1])
                    found[backend].append((time.perf_counter() - start, own_s))
            medians = (
                [median(column) for column in zip(*it, strict=True)] for it in found.values()
            )
            rows.append([str(ranks), *(f"{whole:.1f} ({own:.1f})" for whole, own in medians)])
    print("\n".join(table(["ranks", "mntrain, s (of rank 0)", "gloo, s (of rank 0)"], rows, 0)))


if __name__ == "__main__":
    main()
