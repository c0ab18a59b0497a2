"""Descriptions of how nodes exchange parameters, if not the gradients of every step.

A node is one replica: its ranks average gradients in every step. `world.optimizer(sync=...)` binds
a description to the ranks of a job. Importing this module needs neither torch nor MPI.
"""

import math
from dataclasses import asdict, field, fields
from dataclasses import dataclass as plain_dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from mntrain.config_types import STRICT, OrNone

if TYPE_CHECKING:
    from zero.collectives import Collectives
    from zero.exchange.local_sgd import LocalSGDSchedule
    from zero.exchange.schedule import SyncSchedule

# ruff: noqa: PLC0415 - zero imports torch, which --help does without

# Options of `SyncConfig`, and the modes in which they have an effect.
_MODES = {
    "every": ("local-sgd", "diloco", "streaming", "sparseloco"),
    "warmup": ("local-sgd", "diloco", "streaming", "sparseloco"),
    "max_staleness": ("local-sgd", "diloco", "sparseloco"),
    "outer_lr": ("diloco", "streaming", "sparseloco"),
    "outer_momentum": ("diloco", "streaming"),
    "fragments": ("streaming",),
    "overlap": ("streaming",),
    "mix": ("streaming",),
    "bits": ("streaming",),
    "density": ("sparseloco",),
}


def _check_outer_lr(value: float) -> None:
    """Raise ValueError for what is no learning rate of an outer optimizer."""
    if not 0 < value < math.inf:
        raise ValueError(f"outer_lr is {value!r}: give a number above 0")


def _one_of(names: tuple[str, ...]) -> str:
    """Return names as "a, b or c"."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


@plain_dataclass(frozen=True, repr=False)
class LocalSGD:
    """Nodes average their parameters every `every` steps, after `warmup` synchronous ones.

    A round is the steps between two exchanges. With a `max_staleness`, nodes do not wait for each
    other: one that ends a round goes on while it is exchanged, and waits only for the round that is
    `max_staleness` rounds older (`zero.exchange.stale_rounds`).

    With `weighted`, a node counts in an exchange in proportion to the samples of its steps since
    the last one (what `optimizer.share`, `backward(weight=...)` or `world.shard` say of them), for
    nodes that are not equally fast; else all nodes count the same.

    Source: post-local SGD (Lin et al., ICLR 2020, arXiv 1808.07217), local SGD (Stich, ICLR 2019,
    arXiv 1805.09767). Raises ValueError for numbers that cannot be.
    """

    every: int
    warmup: int = 0
    max_staleness: int = field(default=0, kw_only=True)
    weighted: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.weighted, bool):
            raise ValueError(f"weighted is {self.weighted!r}: give True or False")
        for name, least, unit in (
            ("every", 1, "steps"),
            ("warmup", 0, "steps"),
            ("max_staleness", 0, "rounds"),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}: give a number of {unit}, at least {least}")

    def __repr__(self) -> str:
        """Return it as an expression, in which what is False or 0 by default may be missing."""
        shown = [
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)
            if not one.kw_only or getattr(self, one.name)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def bind(
        self, world: "Collectives", node: "Collectives", cross: "Collectives", *, stage: int
    ) -> "SyncSchedule":
        """Return the schedule over these groups of ranks, for an optimizer of a stage. Local."""
        options = asdict(self)
        if not self.max_staleness:
            del options["max_staleness"]
        return self._schedule()(world, node, cross, sharded=stage > 0, **options)

    def _schedule(self) -> "type[LocalSGDSchedule]":
        from zero.exchange.local_sgd import LocalSGDSchedule
        from zero.exchange.stale_rounds import StaleSchedule

        return StaleSchedule if self.max_staleness else LocalSGDSchedule


@plain_dataclass(frozen=True, repr=False)
class DiLoCo(LocalSGD):
    """Every `every` steps, Nesterov momentum moves the parameters towards the mean of the nodes'.

    Source: DiLoCo (Douillard et al., 2023, arXiv 2311.08105), whose outer optimizer these defaults
    are. Raises ValueError for arguments that cannot be.
    """

    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_outer_lr(self.outer_lr)
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"outer_momentum is {self.outer_momentum!r}: give a number from 0, and below 1"
            )

    def _schedule(self) -> "type[LocalSGDSchedule]":
        from zero.exchange.local_sgd import DiLoCoSchedule
        from zero.exchange.stale_rounds import StaleDiLoCoSchedule

        return StaleDiLoCoSchedule if self.max_staleness else DiLoCoSchedule


@plain_dataclass(frozen=True, repr=False)
class StreamingDiLoCo(DiLoCo):
    """DiLoCo in `fragments` parts, each exchanged every `every` steps while others compute.

    What is sent after a step is applied `overlap` steps later; the node's parameters then become
    `mix` times their own and 1 - mix times the outer optimizer's. `bits` 4 or 32 of each element
    travel. Fewer fragments are used than given if there are fewer steps.

    Source: Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512). Raises ValueError for
    arguments that cannot be.
    """

    fragments: int = 4
    overlap: int = 1
    mix: float = 0.5
    bits: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_staleness:
            raise ValueError(
                f"max_staleness is {self.max_staleness}: StreamingDiLoCo hides exchanges behind "
                "the next overlap steps instead; give overlap, or another description"
            )
        if type(self.fragments) is not int or self.fragments < 1:
            raise ValueError(f"fragments is {self.fragments!r}: give a number, at least 1")
        if type(self.overlap) is not int or not 0 <= self.overlap < self.every:
            raise ValueError(
                f"overlap is {self.overlap!r}: give a number of steps from 0, and below every, "
                f"which is {self.every}"
            )
        if not 0 <= self.mix < 1:
            raise ValueError(f"mix is {self.mix!r}: give a number from 0, and below 1")
        if self.bits not in (4, 32):
            raise ValueError(f"bits is {self.bits!r}: give 4 or 32")

    def _schedule(self) -> "type[LocalSGDSchedule]":
        from zero.exchange.fragments import StreamingSchedule

        return StreamingSchedule


@plain_dataclass(frozen=True, repr=False)
class SparseLoCo(LocalSGD):
    """Nodes exchange the largest of their changes every `every` steps, and keep the rest.

    `density` is the part that is sent of each 4,096 elements of a parameter, in 2 bits.

    Source: SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706). Raises ValueError for arguments that
    cannot be.
    """

    outer_lr: float = 1.0
    density: float = 64 / 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_outer_lr(self.outer_lr)
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density!r}: give the part to send, above 0, to 1")

    def _schedule(self) -> "type[LocalSGDSchedule]":
        from zero.exchange.sparse_loco import SparseLoCoSchedule
        from zero.exchange.stale_rounds import StaleSparseLoCoSchedule

        return StaleSparseLoCoSchedule if self.max_staleness else SparseLoCoSchedule


_DESCRIPTIONS: dict[str, type[LocalSGD]] = {
    "local-sgd": LocalSGD,
    "diloco": DiLoCo,
    "streaming": StreamingDiLoCo,
    "sparseloco": SparseLoCo,
}


@dataclass(frozen=True, config=STRICT)
class SyncConfig:
    """Exchanges between nodes: the gradients of every step, or parameters every few steps."""

    mode: Literal["every-step", "local-sgd", "diloco", "streaming", "sparseloco"] = Field(
        default="every-step",
        description="every-step: average gradients over all ranks. The others average them within "
        "each node, and every --sync.every steps exchange parameters between nodes: local-sgd by "
        "their mean, diloco by a step of an outer optimizer, streaming by diloco in 4 bits, in "
        "parts and while later steps compute, sparseloco by the largest changes in 2 bits.",
    )
    every: OrNone[int] = Field(
        default=None,
        ge=1,
        description="steps between exchanges, if not after every step. none: not given.",
    )
    warmup: int = Field(
        default=0,
        ge=0,
        description="synchronous steps at the start of the run, if exchanges are rarer.",
    )
    outer_lr: OrNone[float] = Field(
        default=None,
        gt=0,
        description="learning rate of the outer optimizer of diloco and streaming (none: 0.7), and "
        "of sparseloco (none: 1).",
    )
    outer_momentum: OrNone[float] = Field(
        default=None,
        ge=0,
        lt=1,
        description="Nesterov momentum of the outer optimizer of diloco and streaming. none: 0.9.",
    )
    fragments: OrNone[int] = Field(
        default=None,
        ge=1,
        description="parts of the parameters that streaming exchanges in turn. none: 4.",
    )
    overlap: OrNone[int] = Field(
        default=None,
        ge=0,
        description="steps during which an exchange of streaming travels, below --sync.every. "
        "none: 1.",
    )
    mix: OrNone[float] = Field(
        default=None,
        ge=0,
        lt=1,
        description="part of a node's own parameters that streaming keeps in an exchange. "
        "none: 0.5.",
    )
    bits: OrNone[int] = Field(
        default=None,
        description="bits of each element that streaming sends, 4 or 32. none: 4.",
    )
    density: OrNone[float] = Field(
        default=None,
        gt=0,
        le=1,
        description="part of the elements that sparseloco sends. none: 0.015625, 64 of 4096.",
    )

    max_staleness: int = Field(
        default=0,
        ge=0,
        description="rounds (of --sync.every steps) by which a node of local-sgd, diloco and "
        "sparseloco may be ahead of what the others have sent, before it waits for them. 0: every "
        "node waits in each exchange.",
    )

    @model_validator(mode="after")
    def _check_mode(self) -> "SyncConfig":
        if self.mode == "streaming" and self.max_staleness:
            raise ValueError(
                f"--sync.max-staleness {self.max_staleness}: --sync.mode streaming does without, "
                "since its exchanges travel while later steps compute; give --sync.overlap, the "
                "number of these steps, or --sync.mode diloco"
            )
        for name, modes in _MODES.items():
            value = getattr(self, name)
            given = value > 0 if name in ("warmup", "max_staleness") else value is not None
            if given and self.mode not in modes:
                raise ValueError(
                    f"--sync.{name.replace('_', '-')} {value}: has no effect in --sync.mode "
                    f"{self.mode}; give --sync.mode {_one_of(modes)}, or leave it out"
                )
        if self.mode != "every-step" and self.every is None:
            raise ValueError(
                f"--sync.mode {self.mode}: needs the steps between exchanges; give --sync.every, "
                "such as 50"
            )
        if self.bits not in (None, 4, 32):
            raise ValueError(f"--sync.bits {self.bits}: give 4 or 32")
        overlap = StreamingDiLoCo.overlap if self.overlap is None else self.overlap
        if self.mode == "streaming" and self.every is not None and overlap >= self.every:
            given = f"--sync.overlap {overlap}" + (" (the default)" if self.overlap is None else "")
            raise ValueError(
                f"{given}: has to be below --sync.every {self.every}; give at most "
                f"--sync.overlap {self.every - 1}"
            )
        return self

    @property
    def description(self) -> LocalSGD | None:
        """The argument `sync` of `world.optimizer`; None for every-step."""
        if self.mode == "every-step":
            return None
        given = {name: getattr(self, name) for name in _MODES}
        known = {k: v for k, v in given.items() if v is not None and self.mode in _MODES[k]}
        return _DESCRIPTIONS[self.mode](**known)
