"""Measurements of a step and of a job: seconds by phase, memory by role, peak FLOP/s."""

import dataclasses
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from mntrain.comm.collectives import WorldCollectives
from mntrain.metrics.registry import PHASES
from mntrain.rank_info import Usage
from zero.memory import Memory

# Roles of memory that are measured for a whole process or GPU, with their field of `Usage`.
_PROCESS_ROLES = {
    "process_peak": "peak_memory",
    "device_peak": "peak_device_memory",
    "device_now": "device_memory",
    "reserved_peak": "peak_reserved_memory",
    "reserved_now": "reserved_memory",
    "pinned": "pinned_memory",
}

# Peak dense TFLOP/s by torch's name of the GPU: bf16 and fp16 matrices summed in fp32, then fp32
# without TF32, which is torch's default; None where the GPU has no such unit. From NVIDIA's data
# sheets (halved where they state figures with sparsity) and, for the RTX 4090, its white paper.
_PEAKS: dict[str, tuple[float | None, float, float]] = {
    r"(NVIDIA )?A100-.*|(NVIDIA )?A100 .*PCIe": (312, 312, 19.5),
    r"NVIDIA H100 PCIe": (756, 756, 51),
    r"NVIDIA H100 NVL": (835, 835, 60),
    r"NVIDIA H100( \d+GB HBM[23]e?)?": (989, 989, 67),
    r"NVIDIA H200 NVL": (836, 836, 60),
    r"NVIDIA (H200|GH200 .*)": (989, 989, 67),
    r"NVIDIA B200": (2250, 2250, 75),
    r"NVIDIA L40S": (362, 362, 91.6),
    r"NVIDIA A10G": (70, 70, 35),
    r"Tesla V100-SXM2-.*": (None, 125, 15.7),
    r"Tesla V100-PCIE-.*": (None, 112, 14),
    r"NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6),
}


class StepTimer:
    """Stopwatch of one step, from construction on. All times are seconds of wall-clock time."""

    def __init__(self, collectives: WorldCollectives) -> None:
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._start = time.perf_counter()
        self._collectives = collectives
        self._busy_s, self._waited_s = collectives.busy_s, collectives.waited_s

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] += time.perf_counter() - start

    def times(self) -> dict[str, float]:
        """Return the times since the step began, by field of `StepRecord`."""
        return {
            "step_s": time.perf_counter() - self._start,
            "communication": self._collectives.busy_s - self._busy_s,
            "exposed": self._collectives.waited_s - self._waited_s,
            **self._phases,
        }


def memory_by_role(
    measured: Sequence[Memory], expected: Sequence[Memory], usage: Sequence[Usage]
) -> dict[str, dict[str, int]]:
    """Return the bytes that each role of memory took; all arguments are by rank. Pure.

    Roles are those of `Memory`, their total, and what whole processes and GPUs used. Each has the
    least, median and most over ranks and the first rank with the most ("peak_rank"); the roles of
    `Memory` also have the prediction for that rank ("expected").
    """
    report = {}
    for role in [field.name for field in dataclasses.fields(Memory)] + ["total"]:
        spread = _spread([getattr(memory, role) for memory in measured])
        report[role] = {"expected": getattr(expected[spread["peak_rank"]], role), **spread}
    for role, field in _PROCESS_ROLES.items():
        report[role] = _spread([getattr(used, field) for used in usage])
    return report


def _spread(by_rank: Sequence[int]) -> dict[str, int]:
    most = max(by_rank)
    median = round(statistics.median(by_rank))
    peak_rank = by_rank.index(most)
    return {"least": min(by_rank), "median": median, "most": most, "peak_rank": peak_rank}


def peak(model: str, dtype: str) -> float | None:
    """Return the peak dense FLOP/s of a GPU in "fp32", "bf16" or "fp16"; None if unknown.

    `model` is torch's name of the GPU. The peak of a part of a GPU (MIG) is unknown.
    """
    for pattern, (bf16, fp16, fp32) in _PEAKS.items():
        if re.fullmatch(pattern, model) and "MIG" not in model:
            tera = {"bf16": bf16, "fp16": fp16, "fp32": fp32}[dtype]
            return None if tera is None else tera * 1e12
    return None


def peak_of_job(gpus: Iterable[tuple[str, str]], dtype: str) -> float | None:
    """Return the sum of the peaks of a job's GPUs; None on CPUs or if any is unknown.

    `gpus` has (UUID, model) by rank. A GPU that several ranks share counts once.
    """
    peaks = [peak(model, dtype) for _, model in set(gpus)]
    known = [flops for flops in peaks if flops is not None]
    return sum(known) if known and len(known) == len(peaks) else None
