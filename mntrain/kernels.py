"""CuPy's kernels or torch's: whichever is faster on a rank's device, one operation at a time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

import torch
from torch import Tensor

from mntrain.cupy_kernels import CupyKernels
from zero.kernels import Kernels, TorchKernels

OPERATIONS = ("add", "pack", "square_sums")
TURNS = 5  # of each way, in turn, so that noise falls on both alike
TURN_S = 4e-4  # so that all cases take some 50 ms
NUMELS = (1 << 16, 1 << 22)
# By how much CuPy's must be faster, so that the choice is the same from run to run.
MARGIN = 1.1
# What squares that are summed in fp64 in another order may differ by.
NEAR = 1e-12


@dataclass(frozen=True)
class KernelCase:
    """One use of an operation: `run` does it with some kernels, and gives the result to compare."""

    operation: str
    what: str
    run: Callable[[Kernels], Tensor]


@dataclass(frozen=True)
class KernelComparison:
    """The seconds that a case takes, and whether both ways have the same result."""

    operation: str
    what: str
    torch_s: float
    cupy_s: float
    same: bool = True


class SelectedKernels:
    """`zero.kernels.Kernels` that are each torch's or CuPy's; `why` says so in a line."""

    def __init__(self, by_operation: Mapping[str, Kernels], why: str) -> None:
        names = {kernels.name for kernels in by_operation.values()}
        self.name = names.pop() if len(names) == 1 else "mixed"
        self.why = why
        self.add = by_operation["add"].add
        self.pack = by_operation["pack"].pack
        self.square_sums = by_operation["square_sums"].square_sums


def choose(
    device: torch.device, make: Callable[[torch.device], Kernels] = CupyKernels
) -> SelectedKernels:
    """The kernels for tensors on a device. Local; on CUDA it compiles, waits for the device, times.

    Torch's on the CPU, and where CuPy's cannot be made (`make` raises) or do not run; else each
    operation is the faster one's, if CuPy's result is the same as torch's.
    """
    if device.type != "cuda":
        return _only_torch(f"the device is {device.type}")
    plain = TorchKernels()
    try:
        cupy = make(device)
        compared = measure(device, cupy)
        torch.cuda.empty_cache()
    except Exception as error:  # of the driver, the compiler, the import: torch does without them
        first = next(iter(str(error).splitlines()), "")
        return _only_torch(f"CuPy's do not work here: {type(error).__name__}: {first}")
    wins = winners(compared)
    by_operation = {name: cupy if name in wins else plain for name in OPERATIONS}
    return SelectedKernels(by_operation, line(compared))


def measure(device: torch.device, cupy: Kernels) -> list[KernelComparison]:
    """Try and time torch's kernels and `cupy` on a device. Local; waits for the device."""
    plain = TorchKernels()
    compared = []
    for case in cases(device):
        same = _same(case, plain, cupy)
        torch_s, cupy_s = _times(case, (plain, cupy), device)
        compared.append(KernelComparison(case.operation, case.what, torch_s, cupy_s, same))
    return compared


def cases(device: torch.device) -> Iterator[KernelCase]:
    """What is compared: each operation, as training uses it, on few and on many elements."""
    generator = torch.Generator(device).manual_seed(0)
    for numel in NUMELS:
        label = f"at {numel >> 10} Ki elements"
        one, two, three = (torch.randn(numel, device=device, generator=generator) for _ in range(3))
        narrow = [addend.bfloat16() for addend in (one, two, three)]
        for addends in ([*narrow[:2]], narrow, [one, *narrow[1:]]):
            total = torch.empty_like(addends[0])
            what = " + ".join(_short(addend) for addend in addends)
            yield KernelCase("add", f"{what} {label}", _adds(addends, total))
        for source, target in ((one, narrow[0]), (narrow[0], one)):
            what = f"{_short(source)} to {_short(target)}"
            yield KernelCase("pack", f"{what} {label}", _packs(source, torch.empty_like(target)))
        parts = one.split([numel // 2, *[numel // 128] * 64])
        yield KernelCase("square_sums", f"of {len(parts)} tensors {label}", _squares(parts))


def winners(compared: Sequence[KernelComparison]) -> set[str]:
    """The operations for which CuPy's kernels are worth it. Pure.

    Those that they always do right, and faster by more than noise in the mean of their cases.
    """
    wrong = {case.operation for case in compared if not case.same}
    return {name for name, ratio in _ratios(compared).items() if ratio > MARGIN} - wrong


def line(compared: Sequence[KernelComparison]) -> str:
    """What was chosen and why, in words. Pure.

    "add by CuPy (2.1x torch's speed), pack by torch (CuPy has 0.9x its speed)".
    """
    ratios, wins = _ratios(compared), winners(compared)
    said = []
    for name, ratio in ratios.items():
        if name in wins:
            said.append(f"{name} by CuPy ({ratio:.1f}x torch's speed)")
        elif all(case.same for case in compared if case.operation == name):
            said.append(f"{name} by torch (CuPy has {ratio:.1f}x its speed)")
        else:
            said.append(f"{name} by torch (CuPy's result differs)")
    return ", ".join(said)


def _ratios(compared: Sequence[KernelComparison]) -> dict[str, float]:
    """How many times torch's speed CuPy's kernels have, by operation: geometric means."""
    ratios: dict[str, list[float]] = {}
    for case in compared:
        ratios.setdefault(case.operation, []).append(case.torch_s / case.cupy_s)
    return {name: geometric_mean(found) for name, found in ratios.items()}


def _same(case: KernelCase, plain: Kernels, other: Kernels) -> bool:
    """Whether two ways leave the same: equal bits, or of squares almost equal numbers."""
    expected, found = case.run(plain).clone(), case.run(other)
    if case.operation == "square_sums":
        return torch.allclose(found, expected, rtol=NEAR, atol=0)
    return torch.equal(found, expected)


def _times(case: KernelCase, ways: Sequence[Kernels], device: torch.device) -> list[float]:
    """The seconds that a case takes by each way: the median of turns of about `TURN_S`."""
    repeats = [max(1, int(TURN_S / _seconds(case, way, device, 1))) for way in ways]
    turns = [
        [_seconds(case, way, device, often) for way, often in zip(ways, repeats, strict=True)]
        for _ in range(TURNS)
    ]
    return [median(took) for took in zip(*turns, strict=True)]


def _seconds(case: KernelCase, way: Kernels, device: torch.device, repeats: int) -> float:
    """What a case takes once, of so many times in a row."""
    _settle(device)
    start = time.perf_counter()
    for _ in range(repeats):
        case.run(way)
    _settle(device)
    return (time.perf_counter() - start) / repeats


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _adds(addends: Sequence[Tensor], total: Tensor) -> Callable[[Kernels], Tensor]:
    def run(kernels: Kernels) -> Tensor:
        kernels.add(addends, total)
        return total

    return run


def _packs(source: Tensor, target: Tensor) -> Callable[[Kernels], Tensor]:
    def run(kernels: Kernels) -> Tensor:
        kernels.pack(source, 0.1, target)
        return target

    return run


def _squares(tensors: Sequence[Tensor]) -> Callable[[Kernels], Tensor]:
    return lambda kernels: kernels.square_sums(tensors)


def _only_torch(reason: str) -> SelectedKernels:
    return SelectedKernels(dict.fromkeys(OPERATIONS, TorchKernels()), f"torch's kernels: {reason}")


def _short(tensor: Tensor) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[tensor.dtype]
