"""Losses of reference runs, committed so that a refactor must reproduce them.

Run as a script it makes `golden_losses.json` anew, on the machine at hand:

    python tests/jobs/golden.py
"""

import json
import platform
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))  # for the script
from job import completed, losses, train

FILE = Path(__file__).with_name("golden_losses.json")
STEPS = 20
# Name of a run: ranks, and the options that it adds. With 4 ranks a step is one micro-batch; with 3
# ranks the shares are unequal and some ranks accumulate micro-batches.
RUNS = {
    "4 ranks on 2 nodes": (4, ("--comm.ranks-per-node", "2")),
    "3 ranks, unequal shares": (3, ("--train.batch-size", "11", "--comm.ranks-per-node", "2")),
}
STAGES = (0, 1, 2)


def machine() -> str:
    """The processor and the torch release, on which the bits of a matrix product depend."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def measure(name: str, stage: int, folder: Path) -> list[float]:
    """The losses of 20 steps and of the evaluation after them."""
    ranks, options = RUNS[name]
    completed(
        train(
            ranks,
            folder,
            *options,
            *("--train.steps", str(STEPS), "--zero.stage", str(stage)),
            env={"OMP_NUM_THREADS": "1"},
        )
    )
    return losses(folder)


def main() -> None:
    """Write the reference file."""
    found: dict[str, object] = {"machine": machine()}
    for name in RUNS:
        by_stage = {}
        for stage in STAGES:
            with tempfile.TemporaryDirectory() as folder:
                by_stage[str(stage)] = measure(name, stage, Path(folder))
        found[name] = by_stage
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
