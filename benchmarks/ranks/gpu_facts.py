"""The GPU and the versions of packages, which every script of gpu.py reports."""

from typing import Any

import torch
from common import versions

PACKAGES = ("triton", "cupy-cuda12x", "cupy-cuda13x")


def facts(device: torch.device) -> dict[str, Any]:
    """Return the name of the GPU ("" for the CPU), CUDA's version and those of the packages."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "",
        "cuda": torch.version.cuda,
        "versions": versions(PACKAGES),
    }
