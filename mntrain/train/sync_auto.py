"""`--sync.mode auto`: the options that a job goes on with, as if the user had given the choice.

A run keeps its mode: a job that resumes it measures again only on another number of nodes, or if
the mode is not possible any more.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from mntrain.checkpoint import FoundCheckpoint
from mntrain.comm.compression import Compression
from mntrain.config import Config
from mntrain.sync import SyncConfig
from mntrain.train import sync_choice
from mntrain.train.sync_choice import Measurement, Situation
from mntrain.train.sync_measurement import (
    MeasurementError,
    measure_codecs,
    measure_computing,
    measure_wire,
    volumes_of,
)
from mntrain.train.trial import Trial
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
        choice = sync_choice.name_of(str(sync.mode), compress, sync.every)
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

    `not_rare` is the reason if rare exchanges would be refused, else empty. Raises AgreedError for
    options that a resumed run's mode does not have. Raises nothing for a task that fails in the
    measurement: every step is synchronous then, and fails in training.
    """
    nodes = len(world.topology.nodes)
    if nodes == 1:
        return AutoSync(_with(config), "every-step: all ranks are on one node")
    before = ""
    if resumed:
        with world.agreement():
            kept = _kept(config, resumed.manifest.config)
        name = sync_choice.name_of(str(kept.sync.mode), kept.comm.compress, kept.sync.every)
        nodes_before = resumed.manifest.world["nodes"]
        if nodes_before == nodes and not (not_rare and kept.sync.every):
            return AutoSync(kept, f"{name}, as in the run so far{_unused(config, kept)}")
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
        warmup=max(0, config.sync.warmup - trial.done),
        ranks_per_node=world.topology.smallest_node,
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

    Options of exchanges that are given now count in a run that has exchanges. Raises ValueError for
    those that its mode does not have, and for a run with gradients in fp16, which auto never
    chooses.
    """
    saved, comm = dict(before.get("sync", {})), before.get("comm", {})
    mode = saved.get("mode", "every-step")
    wire_dtype = comm.get("wire_dtype", "fp32")
    if wire_dtype == "fp16":
        raise ValueError(
            f"--sync.mode auto: the run has --comm.wire-dtype fp16 so far, which auto cannot keep; "
            f"give --sync.mode {mode} and --comm.wire-dtype"
        )
    compress: Compression = "bf16" if wire_dtype == "bf16" else comm.get("compress", "none")
    if mode != "every-step":
        saved |= _given(config.sync)
    try:
        sync = SyncConfig(**saved)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ").partition("; give")[0]
        raise ValueError(
            f"--sync.mode auto keeps --sync.mode {mode}, which the run has so far, and options "
            f"beside it do not suit: {reason}; leave them out, or give another --sync.mode"
        ) from None
    return replace(config, sync=sync, comm=replace(config.comm, compress=compress))


def _unused(config: Config, kept: Config) -> str:
    """Return which given options of exchanges have no effect, as those of a run without any.

    They are not refused: the command that has begun the run continues it.
    """
    given = _given(config.sync) if kept.sync.mode == "every-step" else {}
    if not given:
        return ""
    names = " and ".join(f"--sync.{name.replace('_', '-')}" for name in given)
    return f", in which {names} {'has' if len(given) == 1 else 'have'} no effect"


def _given(sync: SyncConfig) -> dict[str, Any]:
    """Return the options of exchanges that are given beside auto."""
    given = {
        "every": sync.every,
        "warmup": sync.warmup or None,
        "outer_lr": sync.outer_lr,
        "outer_momentum": sync.outer_momentum,
    }
    return {name: value for name, value in given.items() if value is not None}
