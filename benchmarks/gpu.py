"""Training on a GPU: a GPT vs. bare torch, all-reduce by transport, CuPy's sum vs. torch's.

    python benchmarks/gpu.py [--quick] [--parts step transports kernels] [--ranks 2 4]

Needs one GPU, which several ranks share; with more GPUs, each rank has its own. Writes tables and
all figures to docs/results/. Takes about 8 minutes; with `--quick` about 3.

    python benchmarks/gpu.py --device cpu --tiny

runs all of it on the CPU at toy sizes, and writes only to the folder of `--output`.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_page
import torch
from emulated import HERE, facts, output_of, parse_report

sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))
from launch import find_mpirun, is_open_mpi

PARTS = ("step", "transports", "kernels")
MIB = (1, 4, 16, 64, 256, 1024)
QUICK_MIB = (1, 16, 256)
TINY_MIB = (0.25, 1)
LIMIT_S = 600  # for one job
STEP_S, QUICK_STEP_S = 120, 30  # for all steps that are measured
CASE_S, QUICK_CASE_S = 6.0, 2.0  # for one size of all-reduce, all transports
OPEN_MPI = ["--oversubscribe", "--bind-to", "none"]


def main() -> int:
    """Measure, and write the results."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--tiny", action="store_true", help="toy sizes; needed with --device cpu")
    options.add_argument("--quick", action="store_true", help="fewer sizes, fewer steps")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="for all-reduce")
    options.add_argument("--micro-batch", type=int, default=0, help="sequences. 0: what has room")
    options.add_argument("--output", type=Path, metavar="DIR", help="where results/ is; docs/")
    given = options.parse_args()
    if why := refusal(given.device, tiny=given.tiny, gpus=torch.cuda.device_count()):
        options.exit(2, f"gpu.py: {why}\n")
    page: dict[str, Any] = {**facts(), "device": given.device}
    if "step" in given.parts:
        page["step"] = measure_step(given)
    if "transports" in given.parts:
        page["transports"] = [measure_transports(given, ranks) for ranks in given.ranks]
    if "kernels" in given.parts:
        page["kernels"] = job(1, "gpu_kernels.py", ["--device", given.device])
    output = given.output or (None if given.tiny else HERE.parent / "docs")
    if output is None:
        print(gpu_page.report(page))
    else:
        gpu_page.publish(page, "gpu-figures", output)
    return 0


def refusal(device: str, *, tiny: bool, gpus: int) -> str:
    """Return why the benchmark cannot run here; "" if it can."""
    if device == "cpu" and not tiny:
        return (
            "on the CPU the sizes of a GPU take hours: add --tiny, which tries the benchmark at "
            "toy sizes"
        )
    if device == "cuda" and not gpus:
        return (
            "torch sees no CUDA device here: run it on a machine with a GPU and a CUDA build of "
            "torch, or try it at toy sizes with --device cpu --tiny"
        )
    return ""


def measure_step(given: argparse.Namespace) -> dict[str, Any]:
    """Measure a world of one vs. bare torch. All variants must begin with the same losses."""
    seconds = 1 if given.tiny else QUICK_STEP_S if given.quick else STEP_S
    words = ["--device", given.device, "--micro-batch", given.micro_batch, "--seconds", seconds]
    found = job(1, "gpu_step.py", [*words, *["--tiny"] * given.tiny])
    losses = [way["loss"] for way in found["ways"].values()]
    assert max(losses) - min(losses) < 1e-3 * max(losses), losses
    return found


def measure_transports(given: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Measure all-reduce between `ranks` ranks, by every transport that works here."""
    mib = TINY_MIB if given.tiny else QUICK_MIB if given.quick else MIB
    case_s = 0.3 if given.tiny else QUICK_CASE_S if given.quick else CASE_S
    words = ["--device", given.device, "--case-s", case_s, "--mib", *mib]
    return job(ranks, "gpu_transports.py", words)


def job(ranks: int, script: str, arguments: Sequence[object]) -> dict[str, Any]:
    """Run a script of ranks/ on `ranks` ranks of this machine, and return its report.

    Ends this program with the output of the ranks if they fail or take longer than LIMIT_S.
    """
    start = time.perf_counter()
    command = [sys.executable, str(HERE / "ranks" / script), *map(str, arguments)]
    words = [find_mpirun(), "-n", str(ranks), *(OPEN_MPI if is_open_mpi() else []), *command]
    with tempfile.TemporaryDirectory() as cache:
        as_root = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
        paths = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
        found = {"XDG_CACHE_HOME": cache, "PYTHONPATH": paths}
        out = output_of(words, {**os.environ, **as_root, **found}, LIMIT_S)
    print(f"{script} on {ranks}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return parse_report(out, command)


if __name__ == "__main__":
    sys.exit(main())
