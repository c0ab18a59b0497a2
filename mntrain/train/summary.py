"""The description of a run at its start, and its summary at the end."""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from mntrain.comm.topology import Topology
from mntrain.config import Config
from mntrain.errors import AgreedError
from mntrain.metrics.registry import METRICS, StepRecord
from mntrain.metrics.step import memory_by_role, peak_of_job
from mntrain.world import World
from zero.optimizer import ZeroOptimizer

_WARMUP_STEPS = 3  # in which caches fill and compilation runs


@dataclass
class JobResult:
    """The end of a job, and its counters: the same on all ranks but for times."""

    flops_per_item: float | None  # of the model, if the task knows it
    skipped_steps: int  # earlier jobs of the run included
    status: str = "running"  # until the end
    last: StepRecord | None = None  # the last completed step of this job, if any
    error: AgreedError | None = None
    reason: str | None = None  # of an early end
    items: int = 0  # tokens or samples that this job has trained on
    seconds: float = 0.0  # of this job
    _steps: int = 0
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=1000))

    def add(self, items: int, seconds: float, *, skipped: bool) -> None:
        """Count a step."""
        self.items += items
        self.skipped_steps += skipped
        self._steps += 1
        if self._steps == _WARMUP_STEPS + 1:
            self._rates.clear()
        self._rates.append(items / seconds)

    @property
    def items_per_s(self) -> float:
        """Median over the last 1000 steps after the warm-up; 0 before the first step."""
        return median(self._rates) if self._rates else 0.0


def describe_job(world: World, config: Config, model: nn.Module) -> list[tuple[str, str]]:
    """Return the description of a job, as lines with their style for the display. Collective."""
    count = sum(parameter.numel() for parameter in model.parameters())
    zero, library = config.zero, world.library
    sharding = f"stage {zero.stage}, by {zero.partition}" if zero.stage else "stage 0"
    reasons = world.gather(world.collectives.no_shared_memory_reason)
    warnings = [shared_memory_warning(reasons, world.topology), world.sharing]
    where = f"{world.topology}, {world.algorithm}"
    facts = {
        "auto": world.tuning,
        "transport": world.transport_line,
        "kernels": world.kernels.why if world.device.type == "cuda" else "",
    }
    return [
        (f"{config.task}: {count / 1e6:.2f} M parameters", "bold"),
        (f"{where}, {library.name} (thread level {library.threads})", ""),
        *((f"{name}: {fact}", "") for name, fact in facts.items() if fact),
        *((f"warning: {line}", "yellow") for text in warnings for line in text.splitlines()),
        (f"zero: {sharding}; precision {config.train.precision}", ""),
    ]


def shared_memory_warning(reasons: Sequence[str], topology: Topology) -> str:
    """Return a warning that names the nodes whose ranks share no memory, or "". Pure.

    `reasons` is by rank: why the rank exchanges messages with its node instead, or "".
    """
    nodes: dict[str, set[int]] = {}
    for rank, reason in enumerate(reasons):
        if reason:
            nodes.setdefault(reason, set()).add(topology.node(rank))
    if not nodes:
        return ""
    by_reason = "; ".join(
        f"node{'s' * (len(affected) > 1)} {', '.join(map(str, sorted(affected)))}: {reason}"
        for reason, affected in nodes.items()
    )
    return (
        f"ranks of a node share no memory and send each other messages instead, which is slower "
        f"({by_reason}). Run all ranks of a node as one user, in one container, with memory to "
        "spare"
    )


def summarize(
    world: World,
    optimizer: ZeroOptimizer,
    config: Config,
    run_dir: Path,
    result: JobResult,
) -> dict[str, Any]:
    """Return the content of summary.json. Collective."""
    usage = world.usage()
    memory = world.gather((optimizer.memory(), optimizer.expected_memory()))
    measured, expected = zip(*memory, strict=True)
    # Recomputation in backward does not count: PaLM, appendix B (2022, arXiv 2204.02311).
    per_item = result.flops_per_item
    flops_per_s = per_item * result.items_per_s if per_item else None
    dtype = config.train.precision.removesuffix("-pure")  # in which matrices are multiplied
    peak = peak_of_job([(place.gpu, place.model) for place in world.places], dtype)
    last = result.last
    return {
        "status": result.status,
        "steps": last.step if last else 0,
        "skipped_steps": result.skipped_steps,
        **{
            metric.summary: getattr(last, name) if last else None
            for name, metric in METRICS.items()
            if metric.summary
        },
        "wall_s": result.seconds,
        "tokens_per_s": result.items / result.seconds,
        "model_flops_per_s": flops_per_s,
        "computes_in": dtype,
        "utilisation": flops_per_s / peak if flops_per_s is not None and peak else None,
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
        "reason": result.reason,
    }
