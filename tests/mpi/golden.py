"""Losses of a reference run at each stage, committed so that a refactor must reproduce them.

Run as a script it makes `golden_losses.json` anew, on the machine at hand:

    python tests/mpi/golden.py
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
RANKS = 3
STAGES = (0, 1, 2)
# Shares are unequal, and some ranks accumulate micro-batches.
OPTIONS = ("--train.batch-size", "11", "--comm.ranks-per-node", "2", "--train.steps", "20")


def machine() -> str:
    """The processor and the torch release, on which the bits of a matrix product depend."""
    wanted, found = ("model name", "cpu family", "model", "stepping"), {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            found.setdefault(name.strip(), value.strip())
    # Clouds call several processors by one name.
    model = " ".join(found.get(name, "") for name in wanted).strip() or platform.machine()
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def main() -> None:
    """Write the reference file."""
    found: dict[str, object] = {"machine": machine()}
    for stage in STAGES:
        with tempfile.TemporaryDirectory() as folder:
            completed(train(RANKS, Path(folder), *OPTIONS, "--zero.stage", str(stage)))
            found[str(stage)] = losses(Path(folder))
    FILE.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
