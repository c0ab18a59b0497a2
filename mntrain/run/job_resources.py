"""Resources that a job has used, for its summary."""

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, astuple
from statistics import median
from typing import Any

from mntrain.rank_info import Usage
from mntrain.ranks import Ranks
from zero.memory import Memory
from zero.optimizer import ZeroOptimizer

# Roles of memory that are measured for a whole process or GPU, with their field of `Usage`.
_PROCESS_ROLES = {
    "process_peak": "peak_memory",
    "device_peak": "peak_device_memory",
    "device_now": "device_memory",
    "reserved_peak": "peak_reserved_memory",
    "reserved_now": "reserved_memory",
    "pinned": "pinned_memory",
}


def resources(world: Ranks, optimizers: Sequence[ZeroOptimizer]) -> dict[str, Any]:
    """Return the entries of summary.json about the world, memory and traffic. Collective."""
    usage = world.usage()
    none = Memory(0, 0, 0, 0, 0)
    several = [none, *(optimizer.memory() for optimizer in optimizers)]
    measured = world.gather(Memory(*map(sum, zip(*map(astuple, several), strict=True))))
    return {
        "world": {
            "size": world.size,
            "nodes": len(world.topology.nodes),
            "topology": str(world.topology),
            "algorithm": world.algorithm,
            "transport": world.transport,
            "library": world.library.name,
        },
        "memory": memory_by_role(measured, usage),
        "ranks": [
            {**asdict(place), **asdict(used)}
            for place, used in zip(world.places, usage, strict=True)
        ],
    }


def memory_by_role(measured: Sequence[Memory], usage: Sequence[Usage]) -> dict[str, dict[str, int]]:
    """Return the bytes that each role of memory took; both arguments are by rank. Pure.

    Roles are those of `Memory`, their total, and what whole processes and GPUs used. Each has the
    least, median and most over ranks and the first rank with the most ("peak_rank").
    """
    report = {}
    for role in [role.name for role in dataclasses.fields(Memory)] + ["total"]:
        report[role] = _spread([getattr(memory, role) for memory in measured])
    for role, usage_field in _PROCESS_ROLES.items():
        report[role] = _spread([getattr(used, usage_field) for used in usage])
    return report


def _spread(by_rank: Sequence[int]) -> dict[str, int]:
    most = max(by_rank)
    spread = {"least": min(by_rank), "median": round(median(by_rank)), "most": most}
    return {**spread, "peak_rank": by_rank.index(most)}
