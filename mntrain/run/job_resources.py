"""Resources that a job or an own loop has used, for its summary."""

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace
from statistics import median
from typing import Any

from mntrain.rank_info import Usage
from mntrain.ranks import Ranks
from zero.memory import Memory
from zero.optimizer import ZeroOptimizer

# Roles of memory that are measured for a whole process or GPU, with their field of `Usage`.
_PROCESS_ROLES = {
    "communication": "buffer_memory",
    "process_peak": "peak_memory",
    "device_peak": "peak_device_memory",
    "device_now": "device_memory",
    "reserved_peak": "peak_reserved_memory",
    "reserved_now": "reserved_memory",
    "pinned": "pinned_memory",
}
_ROLES = [role.name for role in dataclasses.fields(Memory)]
_TRAFFIC = ("node_messages", "node_bytes", "cross_messages", "cross_bytes")


def resources(
    world: Ranks, optimizers: Sequence[ZeroOptimizer], samples: int, wall_s: float
) -> dict[str, Any]:
    """Return the entries of summary.json about the world, memory and traffic. Collective.

    This rank has trained on so many samples, in `wall_s` seconds of the job.
    """
    usage = world.usage()
    measured = _sum([optimizer.memory() for optimizer in optimizers])
    own = measured, _predicted(optimizers, measured), _predicted(optimizers, measured, stage=0)
    checks = [optimizer.weight_checks for optimizer in optimizers]
    checks_s = sum(seconds for _, seconds in checks)
    gathered = world.gather((*own, samples, checks_s))
    by_rank, predicted, at_stage_0, samples_by_rank, checks_by_rank = zip(*gathered, strict=True)
    compressed = {
        "before_bytes": sum(used.before_bytes for used in usage),
        "sent_bytes": sum(used.compressed_bytes for used in usage),
    }
    sent, before = compressed["sent_bytes"], compressed["before_bytes"]
    total_samples = sum(samples_by_rank) or None
    return {
        "world": {
            "size": world.size,
            "nodes": len(world.topology.nodes),
            "topology": str(world.topology),
            "algorithm": world.algorithm,
            "transport": world.transport,
            "library": world.library.name,
        },
        "stage": _common([optimizer.stage for optimizer in optimizers]),
        "partition": _common([optimizer.partition for optimizer in optimizers]),
        "sync": _common([optimizer.schedule.mode for optimizer in optimizers]),
        "wire_dtype": world.settings.wire_dtype,
        "gather_dtype": world.settings.gather_dtype,
        "compress": world.settings.compress,
        "compression": {**compressed, "ratio": before / sent if sent else None},
        "memory": memory_by_role(by_rank, usage, predicted, at_stage_0),
        "traffic": {name: sum(getattr(used, name) for used in usage) for name in _TRAFFIC},
        **{
            name: median(getattr(used, name) for used in usage)
            for name in ("communication_s", "exposed_s")
        },
        "checks": {"weights": sum(number for number, _ in checks), "seconds": max(checks_by_rank)},
        "samples": total_samples,
        "samples_per_s": total_samples / wall_s if total_samples else None,
        "ranks": [
            {
                **asdict(place),
                **asdict(used),
                "samples": samples,
                "checks_s": checks_s,
                "memory_by_role": asdict(memory),
                "predicted_by_role": asdict(expected) if expected else None,
            }
            for place, used, samples, checks_s, memory, expected in zip(
                world.places,
                usage,
                samples_by_rank,
                checks_by_rank,
                by_rank,
                predicted,
                strict=True,
            )
        ],
    }


def _common(values: Sequence[Any]) -> Any:
    """Return what all have in common, None of none, or all in a list."""
    return list(values) if len(set(values)) > 1 else next(iter(values), None)


def _sum(several: Sequence[Memory]) -> Memory:
    none = Memory(0, 0, 0, 0, 0)
    return Memory(*map(sum, zip(*map(astuple, [none, *several]), strict=True)))


def _predicted(
    optimizers: Sequence[ZeroOptimizer], measured: Memory, stage: int | None = None
) -> Memory | None:
    """Return what optimizers take by their layout, or None if it is not known. Local.

    What hooks and sync schedules keep counts as it was measured.
    """
    try:
        predicted = _sum([optimizer.predicted_memory(stage) for optimizer in optimizers])
    except Exception:  # of an optimizer that needs more than tensors without memory
        return None
    return replace(predicted, hook=measured.hook, exchange=measured.exchange)


def memory_by_role(
    measured: Sequence[Memory],
    usage: Sequence[Usage],
    predicted: Sequence[Memory | None] = (),
    at_stage_0: Sequence[Memory | None] = (),
) -> dict[str, dict[str, Any]]:
    """Return the bytes that each role of memory took; all arguments are by rank. Pure.

    Roles are those of `Memory`, their total, and what whole processes and GPUs used. Each has the
    least, median and most over ranks and the first rank with the most ("peak_rank"). Those of
    `Memory` also have what was predicted, the most at stage 0, and what less than this the most is
    ("saved"); None where it is not known.
    """
    report: dict[str, dict[str, Any]] = {}
    for role in [*_ROLES, "total"]:
        spread = _spread([getattr(memory, role) for memory in measured])
        expected, first = (
            [getattr(memory, role) for memory in by_rank if memory]
            for by_rank in (predicted, at_stage_0)
        )
        before = max(first, default=None)
        saved = None if before is None else before - spread["most"]
        report[role] = {
            **spread,
            "predicted_least": min(expected, default=None),
            "predicted": max(expected, default=None),
            "stage_0": before,
            "saved": saved,
            "saved_share": saved / before if before and saved is not None else None,
        }
    for role, usage_field in _PROCESS_ROLES.items():
        report[role] = _spread([getattr(used, usage_field) for used in usage])
    return report


def _spread(by_rank: Sequence[int]) -> dict[str, int]:
    most = max(by_rank)
    spread = {"least": min(by_rank), "median": round(median(by_rank)), "most": most}
    return {**spread, "peak_rank": by_rank.index(most)}
