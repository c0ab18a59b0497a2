"""What is told of a run at its start and at its end."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from mntrain.comm.topology import Topology
from mntrain.config import Config
from mntrain.metrics.flops import COMPUTES_IN, peak_of_all
from mntrain.metrics.step import StepRecord, memory_by_role
from mntrain.rank_info import Place
from mntrain.world import World
from zero.optimizer import ZeroOptimizer


def introduction(world: World, config: Config, model: nn.Module) -> dict[str, str]:
    """What runs where and how, for `Reporter.start`. Collective."""
    count = sum(parameter.numel() for parameter in model.parameters())
    zero = config.zero
    said = world.gather(world.collectives.no_shared_memory_reason)
    concerns = [without_memory(said, world.topology), world.sharing]
    sharding = f"stage {zero.stage}, by {zero.partition}" if zero.stage else "stage 0"
    return {
        "library": world.library.name,
        "thread_level": world.library.threads,
        "topology": str(world.topology),
        "algorithm": world.algorithm,
        "tuning": world.tuning,
        "transport": world.transport_line,
        "kernels": world.kernels.why if world.device.type == "cuda" else "",
        "concern": "\n".join(concern for concern in concerns if concern),
        "zero": f"zero: {sharding}; precision {config.train.precision}",
        "model": f"{config.task}: {count / 1e6:.2f} M parameters",
    }


def without_memory(said: Sequence[str], topology: Topology) -> str:
    """Which nodes' ranks share no memory, why, and what to do; empty where all do. Pure.

    `said` is by rank: why not, or an empty text.
    """
    nodes: dict[str, set[int]] = {}
    for rank, why in enumerate(said):
        if why:
            nodes.setdefault(why, set()).add(topology.node(rank))
    if not nodes:
        return ""
    reasons = "; ".join(
        f"node{'s' * (len(where) > 1)} {', '.join(map(str, sorted(where)))}: {why}"
        for why, where in nodes.items()
    )
    return (
        f"ranks of a node share no memory and send each other messages instead, which is slower "
        f"({reasons}). Run all ranks of a node as one user, in one container, with memory to spare"
    )


def summary(
    world: World,
    optimizer: ZeroOptimizer,
    *,
    status: str,
    last: StepRecord | None,
    skipped_steps: int,
    items: int,
    seconds: float,
    flops_per_s: float | None,
    precision: str,
    run_dir: Path,
) -> dict[str, Any]:
    """What summary.json holds of a run that trained on `items` until step `last`. Collective.

    `flops_per_s` is what the model computed a second, over all ranks, if the task can tell, and
    `precision` what of --train.precision it computed in.
    """
    usage = world.usage()
    memory = world.gather((optimizer.memory(), optimizer.expected_memory()))
    measured, expected = zip(*memory, strict=True)
    return {
        "status": status,
        "steps": last.step if last else 0,
        "skipped_steps": skipped_steps,
        "final_loss": last.loss if last else None,
        "eval_loss": last.eval_loss if last else None,
        "eval_metrics": last.eval_metrics if last else None,
        "wall_s": seconds,
        "tokens_per_s": items / seconds,
        **_computed(world.places, flops_per_s, COMPUTES_IN[precision]),
        "run_dir": str(run_dir),
        "world": {
            "size": world.size,
            "nodes": len(world.topology.nodes),
            "topology": str(world.topology),
            "algorithm": world.algorithm,
            "tuning": world.tuning,
            "transport": world.transport,
            "library": world.library.name,
        },
        "memory": memory_by_role(measured, expected, usage),
        "ranks": [
            {**asdict(place), **asdict(used)}
            for place, used in zip(world.places, usage, strict=True)
        ],
    }


def _computed(
    places: Sequence[Place], flops_per_s: float | None, dtype: str
) -> dict[str, float | str | None]:
    """The model's FLOP/s, in which dtype, and the share of the peak where that is known. Pure."""
    peak = peak_of_all([(place.gpu, place.model) for place in places], dtype)
    return {
        "model_flops_per_s": flops_per_s,
        "computes_in": dtype,
        "utilisation": flops_per_s / peak if flops_per_s is not None and peak else None,
    }
