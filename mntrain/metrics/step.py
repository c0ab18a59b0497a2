"""Measurements of a step and of a job: seconds by phase, memory by role."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
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


class StepTimer:
    """Stopwatch of one step, from construction on. All times are seconds of wall-clock time."""

    def __init__(self, collectives: WorldCollectives) -> None:
        self.phases = dict.fromkeys(PHASES, 0.0)
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
            self.phases[phase] += time.perf_counter() - start

    def elapsed(self) -> float:
        """Return the time since the step began."""
        return time.perf_counter() - self._start

    def communication(self) -> float:
        """Return the time in which a collective was in progress."""
        return self._collectives.busy_s - self._busy_s

    def exposed(self) -> float:
        """Return the time in which this rank waited for a collective."""
        return self._collectives.waited_s - self._waited_s


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
