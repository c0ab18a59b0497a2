"""Measurements of a training step and of memory: seconds by phase, means, bytes by role."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mntrain.rank_info import Usage
from zero.memory import Memory

PHASES = ("data", "forward", "backward", "reduce_wait", "optimizer")


class PhaseTimer:
    """A stop-watch for the phases of a step. Seconds of wall-clock time."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start


class WeightedSums:
    """Sums of means, each weighed by its count, so that totals over ranks give exact means."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, count: int, means: Mapping[str, Tensor]) -> None:
        """Add 0-dim means over the same `count` items. Does not wait for a device."""
        self.count += count
        for name, mean in means.items() if count else ():
            term = mean.detach().to(torch.float64) * count
            self._sums[name] = self._sums[name] + term if name in self._sums else term

    def names(self) -> list[str]:
        """What has been added so far."""
        return list(self._sums)

    def sums(self, names: Sequence[str]) -> list[float]:
        """Sums by name, 0 for what was never added. Waits for the device, once."""
        known = [name for name in names if name in self._sums]
        if not known:
            return [0.0] * len(names)
        where = self._sums[known[0]].device
        values = torch.stack([self._sums[name].to(where) for name in known]).tolist()
        found = dict(zip(known, values, strict=True))
        return [found.get(name, 0.0) for name in names]


@dataclass(frozen=True)
class StepRecord:
    """One training step, as it stands in metrics.jsonl; means and counts are over all ranks.

    A step that was skipped updated nothing, and has no norms.
    """

    step: int  # 1 for the first
    loss: float  # mean over the samples (or tokens) of the step
    lr: float
    grad_norm: float | None  # of the mean gradient, before clipping
    clip_coef: float | None
    clipped_norm: float | None  # after clipping
    samples: int
    tokens_per_s: float  # what the loss is a mean over (tokens, or samples), a second
    step_s: float  # from the end of the step before to the end of this one, on the master
    data: float  # seconds by phase, on the master
    forward: float
    backward: float
    reduce_wait: float
    optimizer: float
    communication: float  # seconds in which a collective was under way, on the master
    exposed: float  # and in which the master waited for one: what did not overlap
    metrics: dict[str, float]  # the task's further means
    skipped: bool = False  # because the gradient was not finite
    eval_loss: float | None = None  # of an evaluation made after this step
    eval_metrics: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object, without what is absent."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


def memory_by_role(
    measured: Sequence[Memory], expected: Sequence[Memory], usage: Sequence[Usage]
) -> dict[str, dict[str, int]]:
    """What each role of memory took, in bytes; all three are by rank. Pure.

    Roles are those of `Memory` and their total, then the peaks of the processes, and what torch has
    allocated and reserved on their GPUs. For each: the least, median and most over ranks, the first
    rank with the most, and what that rank was expected to need, where that can be known.
    """
    roles = [field.name for field in dataclasses.fields(Memory)] + ["total"]
    report = {}
    for role in roles:
        spread = _spread([getattr(memory, role) for memory in measured])
        report[role] = {"expected": getattr(expected[spread["peak_rank"]], role), **spread}
    report["process_peak"] = _spread([used.peak_memory for used in usage])
    report["device_peak"] = _spread([used.peak_device_memory for used in usage])
    report["device_now"] = _spread([used.device_memory for used in usage])
    report["reserved_peak"] = _spread([used.peak_reserved_memory for used in usage])
    report["reserved_now"] = _spread([used.reserved_memory for used in usage])
    report["pinned"] = _spread([used.pinned_memory for used in usage])
    return report


def _spread(by_rank: Sequence[int]) -> dict[str, int]:
    most = max(by_rank)
    middle = round(statistics.median(by_rank))
    peak_rank = by_rank.index(most)
    return {"least": min(by_rank), "median": middle, "most": most, "peak_rank": peak_rank}
