"""The rank's part of gpu.py: the sum of several addends by CuPy's kernel and by torch."""

import argparse
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
from common import report
from gpu_facts import facts
from torch import Tensor

from mntrain.device_kernels import DeviceKernels
from zero.kernels import Add, add

NUMELS = (1 << 16, 1 << 22)
TURNS = 5  # of each kernel, in turn, so that noise falls on both alike
TURN_S = 4e-4
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def main() -> None:
    """Measure and report; on the CPU, compare torch with itself."""
    options = argparse.ArgumentParser()
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = torch.device(options.parse_args().device)
    kernels = DeviceKernels(device)
    if device.type == "cuda" and kernels.name != "cupy":
        report({**facts(device), "absent": kernels.why})
        return
    rows = [compare(what, addends, kernels) for what, addends in cases(device)]
    report({**facts(device), "other": kernels.name, "rows": rows})


def cases(device: torch.device) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield sums as training uses them, of few and of many elements."""
    generator = torch.Generator(device).manual_seed(0)
    for numel in NUMELS:
        wide = [torch.randn(numel, device=device, generator=generator) for _ in range(4)]
        narrow = [addend.bfloat16() for addend in wide]
        for addends in (narrow[:2], narrow[:3], narrow, wide[:3], wide, [wide[0], *narrow[1:3]]):
            names = " + ".join(NAMES[addend.dtype] for addend in addends)
            yield f"{names} of {numel >> 10} Ki elements", addends


def compare(what: str, addends: Sequence[Tensor], kernels: DeviceKernels) -> dict[str, Any]:
    """Return the medians of both kernels' times and whether their bits agree."""
    ways = (add, kernels.add)
    totals = [torch.empty_like(addends[0]) for _ in ways]
    pairs = list(zip(ways, totals, strict=True))
    once = [seconds(way, addends, total, 1) for way, total in pairs]
    repeats = [max(1, int(TURN_S / took)) for took in once]
    turns = [
        [seconds(way, addends, total, repeats[i]) for i, (way, total) in enumerate(pairs)]
        for _ in range(TURNS)
    ]
    torch_s, cupy_s = (median(took) for took in zip(*turns, strict=True))
    return {
        "what": what,
        "torch_s": torch_s,
        "cupy_s": cupy_s,
        "same": torch.equal(*totals),
    }


def seconds(way: Add, addends: Sequence[Tensor], total: Tensor, repeats: int) -> float:
    """Return the seconds of one sum, of `repeats` in a row."""
    synchronize(total)
    start = time.perf_counter()
    for _ in range(repeats):
        way(addends, total)
    synchronize(total)
    return (time.perf_counter() - start) / repeats


def synchronize(tensor: Tensor) -> None:
    """Wait for the tensor's device."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


if __name__ == "__main__":
    main()
