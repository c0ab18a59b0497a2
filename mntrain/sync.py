"""Descriptions of how nodes exchange parameters, if not the gradients of every step.

A node is one replica: its ranks average gradients in every step. `world.optimizer(sync=...)` binds
a description to the ranks of a job. Importing this module needs neither torch nor MPI.
"""

import math
from dataclasses import asdict
from dataclasses import dataclass as plain_dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from mntrain.config_types import STRICT, OrNone

if TYPE_CHECKING:
    from zero.collectives import Collectives
    from zero.local_sgd import LocalSGDSchedule
    from zero.sync_schedule import SyncSchedule

# ruff: noqa: PLC0415 - zero imports torch, which --help does without

# Options of `SyncConfig`, and the modes in which they have an effect.
_MODES = {
    "every": ("local-sgd", "diloco"),
    "warmup": ("local-sgd", "diloco"),
    "outer_lr": ("diloco",),
    "outer_momentum": ("diloco",),
}


@plain_dataclass(frozen=True)
class LocalSGD:
    """Nodes average their parameters every `every` steps, after `warmup` synchronous ones.

    Source: post-local SGD (Lin et al., ICLR 2020, arXiv 1808.07217), local SGD (Stich, ICLR 2019,
    arXiv 1805.09767). Raises ValueError for numbers of steps that cannot be.
    """

    every: int
    warmup: int = 0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("warmup", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}: give a number of steps, at least {least}")

    def bind(
        self, world: "Collectives", node: "Collectives", cross: "Collectives", *, stage: int
    ) -> "SyncSchedule":
        """Return the schedule over these groups of ranks, for an optimizer of a stage. Local."""
        return self._schedule()(world, node, cross, sharded=stage > 0, **asdict(self))

    def _schedule(self) -> "type[LocalSGDSchedule]":
        from zero.local_sgd import LocalSGDSchedule

        return LocalSGDSchedule


@plain_dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Every `every` steps, Nesterov momentum moves the parameters towards the mean of the nodes'.

    Source: DiLoCo (Douillard et al., 2023, arXiv 2311.08105), whose outer optimizer these defaults
    are. Raises ValueError for arguments that cannot be.
    """

    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.outer_lr < math.inf:
            raise ValueError(f"outer_lr is {self.outer_lr!r}: give a number above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"outer_momentum is {self.outer_momentum!r}: give a number from 0, and below 1"
            )

    def _schedule(self) -> "type[LocalSGDSchedule]":
        from zero.local_sgd import DiLoCoSchedule

        return DiLoCoSchedule


@dataclass(frozen=True, config=STRICT)
class SyncConfig:
    """Exchanges between nodes: the gradients of every step, or parameters every few steps."""

    mode: Literal["every-step", "local-sgd", "diloco"] = Field(
        default="every-step",
        description="every-step: average gradients over all ranks. The others average them within "
        "each node, and every --sync.every steps exchange parameters between nodes: local-sgd by "
        "their mean, diloco by a step of an outer optimizer.",
    )
    every: OrNone[int] = Field(
        default=None,
        ge=1,
        description="steps between exchanges, for local-sgd and diloco. none: not given.",
    )
    warmup: int = Field(
        default=0,
        ge=0,
        description="synchronous steps at the start of the run, for local-sgd and diloco.",
    )
    outer_lr: OrNone[float] = Field(
        default=None, gt=0, description="learning rate of diloco's outer optimizer. none: 0.7."
    )
    outer_momentum: OrNone[float] = Field(
        default=None,
        ge=0,
        lt=1,
        description="Nesterov momentum of diloco's outer optimizer. none: 0.9.",
    )

    @model_validator(mode="after")
    def _check_mode(self) -> "SyncConfig":
        for name, modes in _MODES.items():
            value = getattr(self, name)
            given = value > 0 if name == "warmup" else value is not None
            if given and self.mode not in modes:
                raise ValueError(
                    f"--sync.{name.replace('_', '-')} {value}: has no effect in --sync.mode "
                    f"{self.mode}; give --sync.mode {' or '.join(modes)}, or leave it out"
                )
        if self.mode != "every-step" and self.every is None:
            raise ValueError(
                f"--sync.mode {self.mode}: needs the steps between exchanges; give --sync.every, "
                "such as 50"
            )
        return self

    @property
    def description(self) -> LocalSGD | None:
        """The argument `sync` of `world.optimizer`; None for every-step."""
        if self.every is None:
            return None
        if self.mode == "local-sgd":
            return LocalSGD(self.every, self.warmup)
        given = {"outer_lr": self.outer_lr, "outer_momentum": self.outer_momentum}
        outer = {name: value for name, value in given.items() if value is not None}
        return DiLoCo(self.every, self.warmup, **outer)
