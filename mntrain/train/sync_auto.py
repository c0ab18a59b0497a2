"""`--sync.mode auto`: the options that a job goes on with, as if the user had given the choice.

A run keeps its mode: a job that resumes it measures again only on another number of nodes, or if
the mode is not possible any more.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mntrain.checkpoint import FoundCheckpoint
from mntrain.comm.compression import Compression
from mntrain.config import Config
from mntrain.sync import SyncConfig
from mntrain.train import sync_choice
from mntrain.train.sync_choice import Measurement, Situation
from mntrain.train.sync_measurement import (
    MeasurementError,
    Trial,
    measure_codecs,
    measure_computing,
    measure_wire,
    volumes_of,
)
from mntrain.world import World


@dataclass(frozen=True)
class AutoSync:
    """The choice of a job: the same on all ranks."""

    config: Config  # this rank's, with the chosen mode and compression in place of auto
    why: str  # one sentence
    measured: bool = False
    failed: bool = False  # the measurement
    details: Mapping[str, Any] = field(default_factory=dict)  # of the measurement

    @property
    def compress(self) -> str | None:
        """The communication hook of the optimizer; None for gradients as they are."""
        name = self.config.comm.compress
        return None if name == "none" else name

    def summary(self) -> dict[str, Any]:
        """Return the entry of summary.json."""
        sync, compress = self.config.sync, self.config.comm.compress
        choice = sync_choice.name_of(sync.mode, compress, sync.every)
        return {"choice": choice, "why": self.why, "measured": self.measured, **self.details}


def check_auto(config: Config) -> None:
    """Raise ValueError for options that say themselves how gradients cross nodes. Local."""
    comm = config.comm
    for name, value in (("compress", comm.compress), ("wire-dtype", comm.wire_dtype)):
        if value not in ("none", "fp32"):
            raise ValueError(
                f"--comm.{name} {value}: --sync.mode auto chooses how gradients cross nodes; give "
                "one of the two"
            )


def choose_for_job(
    world: World, config: Config, trial: Trial, resumed: FoundCheckpoint | None, not_rare: str
) -> AutoSync:
    """Return how nodes communicate in a job with --sync.mode auto. Collective.

    `not_rare` is the reason if rare exchanges would be refused, else empty. Raises nothing for a
    task that fails in the measurement: every step is synchronous then, and fails in training.
    """
    nodes = len(world.topology.nodes)
    if nodes == 1:
        return AutoSync(_with(config), "every-step: all ranks are on one node")
    before = ""
    if resumed:
        kept = _kept(config, resumed.manifest.config)
        name = sync_choice.name_of(kept.sync.mode, kept.comm.compress, kept.sync.every)
        nodes_before = resumed.manifest.world["nodes"]
        if nodes_before == nodes and not (not_rare and kept.sync.every):
            return AutoSync(kept, f"{name}, as in the run so far")
        before = f" (chosen anew: the run had {name} on {_nodes(nodes_before)})"
    try:
        measured = _measure(world, config, trial)
    except MeasurementError as error:
        why = f"every-step: a step's computing could not be measured ({error}){before}"
        return AutoSync(_with(config), why, failed=True)
    candidates = sync_choice.list_candidates(_situation(world, config, trial, not_rare), measured)
    candidates, measured = world.gather((candidates, measured))[0]  # rank 0's count
    choice = sync_choice.choose(candidates, measured)
    details = {
        "seconds": asdict(measured),
        "candidates": sync_choice.to_table(candidates, choice),
    }
    made = _with(config, choice.mode, choice.compress, choice.every)
    why = sync_choice.explain(choice, candidates[0], measured) + before
    return AutoSync(made, why, measured=True, details=details)


def _measure(world: World, config: Config, trial: Trial) -> Measurement:
    """Measure a step's computing, the links and the codes. Collective.

    Raises MeasurementError if any rank cannot compute.
    """
    if world.master:
        print(
            "mntrain: measuring a step and the links between nodes, for --sync.mode auto",
            file=sys.stderr,
        )
    computing = measure_computing(world, trial)
    latency_s, s_per_byte = measure_wire(world)
    elements = sum(p.numel() for p in trial.model.parameters() if p.requires_grad)
    return Measurement(
        computing_s=computing.step_s,
        backward_s=computing.backward_s,
        micro_batches=computing.micro_batches,
        latency_s=latency_s,
        s_per_byte=s_per_byte,
        codec_s=measure_codecs(world, elements),
    )


def _situation(world: World, config: Config, trial: Trial, not_rare: str) -> Situation:
    narrow = config.comm.gather_dtype != "fp32"
    volumes = volumes_of(trial.model, stage=config.zero.stage, narrow_gather=narrow)
    excluded = {"rare": not_rare} if not_rare else {}
    if volumes.bf16 == volumes.gradients:
        excluded["bf16"] = "gradients have 16 bits already"
    return Situation(
        nodes=len(world.topology.nodes),
        stage=config.zero.stage,
        volumes=volumes,
        bucket_bytes=max(1, int(config.comm.bucket_mb * (1 << 20))),
        steps=config.train.steps - trial.done,
        every=config.sync.every,
        excluded=excluded,
    )


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _with(
    config: Config,
    mode: str = "every-step",
    compress: Compression = "none",
    every: int | None = None,
) -> Config:
    """Return the configuration with a choice in place of auto.

    Options of exchanges are those that were given; without exchanges they have no effect, and are
    left out.
    """
    options = _given(config.sync) | {"every": every} if every is not None else {}
    sync = SyncConfig(**{"mode": mode, **options})
    return replace(config, sync=sync, comm=replace(config.comm, compress=compress))


def _kept(config: Config, before: Mapping[str, Any]) -> Config:
    """Return the configuration with the mode and the compression of a checkpoint's.

    Options that are given now count, in a run whose mode has them.
    """
    saved = dict(before.get("sync", {}))
    if saved.get("mode") in ("streaming", "diloco"):
        saved |= _given(config.sync)
    compress = before.get("comm", {}).get("compress", "none")
    return replace(config, sync=SyncConfig(**saved), comm=replace(config.comm, compress=compress))


def _given(sync: SyncConfig) -> dict[str, Any]:
    """Return the options of exchanges that are given beside auto."""
    given = {
        "every": sync.every,
        "warmup": sync.warmup or None,
        "outer_lr": sync.outer_lr,
        "outer_momentum": sync.outer_momentum,
    }
    return {name: value for name, value in given.items() if value is not None}
