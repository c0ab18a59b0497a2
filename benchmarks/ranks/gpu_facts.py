"""What computes, and with which programs: what every script of gpu.py reports."""

from typing import Any

import torch
from common import versions

PACKAGES = ("triton", "cupy-cuda12x", "cupy-cuda13x")


def facts(device: torch.device) -> dict[str, Any]:
    """The GPU by its name, CUDA's version and the packages'; of the CPU the name is empty."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "",
        "cuda": torch.version.cuda,
        "versions": versions(PACKAGES),
    }
