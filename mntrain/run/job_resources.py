"""Resources that a job or an own loop has used, for its summary."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from statistics import median
from typing import Any, NamedTuple

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
_SETTINGS = ("wire_dtype", "gather_dtype", "compress")
_TRAFFIC = ("node_messages", "node_bytes", "cross_messages", "cross_bytes")


class _Used(NamedTuple):
    """Resources that a rank has used."""

    figures: Mapping[str, float]  # "samples", and further ones
    checks_s: float
    memory: Memory
    predicted: Memory | None
    at_stage_0: Memory | None


def resources(
    world: Ranks,
    optimizers: Sequence[ZeroOptimizer],
    figures: Mapping[str, float],
    wall_s: float,
) -> dict[str, Any]:
    """Return the entries of summary.json about the world, memory and traffic. Collective.

    `figures` are of this rank: the "samples" that it has trained on in `wall_s` seconds of the job,
    and others.
    """
    measured = _sum([optimizer.memory() for optimizer in optimizers])
    predicted = (_predicted(optimizers, measured, stage) for stage in (None, 0))
    checks = [optimizer.weight_checks for optimizer in optimizers]
    own = _Used(figures, sum(seconds for _, seconds in checks), measured, *predicted)
    usage, ranks = world.usage(), world.gather(own)
    samples = sum(rank.figures["samples"] for rank in ranks) or None
    checks_s = max(rank.checks_s for rank in ranks)
    return {
        **_settings(world, optimizers),
        "compression": _compression(usage),
        "memory": memory_by_role(
            [rank.memory for rank in ranks],
            usage,
            [rank.predicted for rank in ranks],
            [rank.at_stage_0 for rank in ranks],
        ),
        "traffic": {name: sum(getattr(used, name) for used in usage) for name in _TRAFFIC},
        **{
            name: median(getattr(used, name) for used in usage)
            for name in ("communication_s", "exposed_s")
        },
        "checks": {"weights": sum(number for number, _ in checks), "seconds": checks_s},
        "samples": samples,
        "samples_per_s": samples / wall_s if samples else None,
        "ranks": [
            {
                **asdict(place),
                **asdict(used),
                **rank.figures,
                "checks_s": rank.checks_s,
                "memory_by_role": asdict(rank.memory),
                "predicted_by_role": asdict(rank.predicted) if rank.predicted else None,
            }
            for place, used, rank in zip(world.places, usage, ranks, strict=True)
        ],
    }


def _settings(world: Ranks, optimizers: Sequence[ZeroOptimizer]) -> dict[str, Any]:
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
        "sync": _common([optimizer.sync_schedule.mode for optimizer in optimizers]),
        **{name: getattr(world.settings, name) for name in _SETTINGS},
    }


def _compression(usage: Sequence[Usage]) -> dict[str, Any]:
    before = sum(used.before_bytes for used in usage)
    sent = sum(used.compressed_bytes for used in usage)
    return {"before_bytes": before, "sent_bytes": sent, "ratio": before / sent if sent else None}


def _common(values: Sequence[Any]) -> Any:
    """Return what all have in common, None of none, or all in a list."""
    return list(values) if len(set(values)) > 1 else next(iter(values), None)


def _sum(several: Sequence[Memory]) -> Memory:
    none = Memory(0, 0, 0, 0, 0)
    return Memory(*map(sum, zip(*map(astuple, [none, *several]), strict=True)))


def _predicted(
    optimizers: Sequence[ZeroOptimizer], measured: Memory, stage: int | None
) -> Memory | None:
    """Return what optimizers take by their layout at a stage (None: theirs). Local.

    None if it is not known. What hooks and sync schedules keep counts as it was measured.
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
