"""The rank's part of gpu.py: CuPy's kernels beside torch's."""

import argparse
from dataclasses import asdict

import torch
from common import AbsentError, absence, report
from gpu_facts import facts

from mntrain import kernels
from mntrain.cupy_kernels import CupyKernels
from zero.kernels import Kernels, TorchKernels


def main() -> None:
    """Measure what a job measures at its start, and report; on the CPU torch beside itself."""
    options = argparse.ArgumentParser()
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    given = options.parse_args()
    device = torch.device(given.device)
    try:
        other = made(device)
    except AbsentError as reason:
        report({**facts(device), "absent": str(reason)})
        return
    compared = kernels.measure(device, other)
    report(
        {
            **facts(device),
            "other": other.name,
            "rows": [asdict(row) for row in compared],
            "chosen": kernels.line(compared),
        }
    )


def made(device: torch.device) -> Kernels:
    """CuPy's kernels. AbsentError where there are none."""
    if device.type == "cpu":
        return TorchKernels()
    try:
        return CupyKernels(device)
    except Exception as error:  # whatever its parts raise where something is missing
        raise absence(error) from error


if __name__ == "__main__":
    main()
