"""Descriptions of how nodes exchange parameters, if not the gradients of every step.

A node is one replica: its ranks average gradients in every step. `world.optimizer(sync=...)` binds
a description to the ranks of a job. Importing this module needs neither torch nor MPI.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from mntrain.config_types import STRICT, OrNone

if TYPE_CHECKING:
    from zero.collectives import Collectives
    from zero.exchange.schedule import SyncSchedule

# ruff: noqa: PLC0415 - zero imports torch, which --help does without


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


# What an option of a description may be, and in words.
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "every": (_whole(1), "a number of steps, at least 1"),
    "warmup": (_whole(0), "a number of steps, at least 0"),
    "max_staleness": (_whole(0), "a number of rounds, at least 0"),
    "weighted": (lambda value: isinstance(value, bool), "True or False"),
    "outer_lr": (lambda value: 0 < value < math.inf, "a number above 0"),
    "outer_momentum": (lambda value: 0 <= value < 1, "a number from 0, and below 1"),
    "fragments": (_whole(1), "a number, at least 1"),
    "overlap": (_whole(0), "a number of steps from 0, and below every"),
    "mix": (lambda value: 0 <= value < 1, "a number from 0, and below 1"),
    "bits": (lambda value: value in (4, 32), "4 or 32"),
    "density": (lambda value: 0 < value <= 1, "the part to send, above 0, to 1"),
}


@plain_dataclass(frozen=True, repr=False)
class LocalSGD:
    """Nodes average their parameters every `every` steps, after `warmup` synchronous ones.

    A round is the steps between two exchanges. With a `max_staleness`, nodes do not wait for each
    other: one that ends a round goes on while it is exchanged, and waits only for the round that is
    `max_staleness` rounds older (`zero.exchange.exchange`).

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

    mode: ClassVar[str] = "local-sgd"
    refused: ClassVar[tuple[str, ...]] = ()  # options that have no effect

    def __post_init__(self) -> None:
        for one in fields(self):
            value, (allows, words) = getattr(self, one.name), _ALLOWED[one.name]
            if not allows(value):
                raise ValueError(f"{one.name} is {value!r}: give {words}")

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
        from zero.exchange.exchange import Exchange, StaleExchange

        options = {name: getattr(self, name) for name in ("every", "warmup", "weighted")}
        kind: type[Exchange] = Exchange
        if self.max_staleness:
            kind, options["max_staleness"] = StaleExchange, self.max_staleness
        return kind(world, node, cross, sharded=stage > 0, **options, **self._parts())

    def _parts(self) -> dict[str, Any]:
        """Return the parts of which the exchange is composed (`zero.exchange.exchange`)."""
        from zero.exchange.exchange import OuterSGD

        return {"outer": OuterSGD()} if self.max_staleness else {}


@plain_dataclass(frozen=True, repr=False)
class DiLoCo(LocalSGD):
    """Every `every` steps, Nesterov momentum moves the parameters towards the mean of the nodes'.

    Source: DiLoCo (Douillard et al., 2023, arXiv 2311.08105), whose outer optimizer these defaults
    are. Raises ValueError for arguments that cannot be.
    """

    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    mode: ClassVar[str] = "diloco"

    def _parts(self) -> dict[str, Any]:
        from zero.exchange.exchange import OuterSGD

        return {"outer": OuterSGD(self.outer_lr, self.outer_momentum)}


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

    mode: ClassVar[str] = "streaming"
    refused: ClassVar[tuple[str, ...]] = ("max_staleness",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_staleness:
            raise ValueError(
                f"max_staleness is {self.max_staleness}: StreamingDiLoCo hides exchanges behind "
                "the next overlap steps instead; give overlap, or another description"
            )
        if self.overlap >= self.every:
            words = f"{_ALLOWED['overlap'][1]}, which is {self.every}"
            raise ValueError(f"overlap is {self.overlap}: give {words}")

    def _parts(self) -> dict[str, Any]:
        from zero.comm_hooks.codes import BlockCode

        streamed = {name: getattr(self, name) for name in ("fragments", "overlap", "mix")}
        code = {"code": BlockCode(self.bits)} if self.bits < 32 else {}
        return super()._parts() | streamed | code


@plain_dataclass(frozen=True, repr=False)
class SparseLoCo(LocalSGD):
    """Nodes exchange the largest of their changes every `every` steps, and keep the rest.

    `density` is the part that is sent of each 4,096 elements of a parameter, in 2 bits. A node adds
    its changes to 0.95 times what it has not sent yet.

    Source: SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706). Raises ValueError for arguments that
    cannot be.
    """

    outer_lr: float = 1.0
    density: float = 64 / 4096

    mode: ClassVar[str] = "sparseloco"

    def _parts(self) -> dict[str, Any]:
        from zero.comm_hooks.codes import ChunkCode
        from zero.exchange.exchange import OuterSGD
        from zero.state import UNSENT

        feedback = {"residual": UNSENT, "decay": 0.95}
        return {"outer": OuterSGD(self.outer_lr), "code": ChunkCode(self.density), **feedback}


_DESCRIPTIONS = {kind.mode: kind for kind in (LocalSGD, DiLoCo, StreamingDiLoCo, SparseLoCo)}


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
        description="steps between exchanges, if not after every step. none: not given.",
    )
    warmup: int = Field(
        default=0,
        description="synchronous steps at the start of the run, if exchanges are rarer.",
    )
    outer_lr: OrNone[float] = Field(
        default=None,
        description="learning rate of the outer optimizer of diloco and streaming (none: 0.7), and "
        "of sparseloco (none: 1).",
    )
    outer_momentum: OrNone[float] = Field(
        default=None,
        description="Nesterov momentum of the outer optimizer of diloco and streaming. none: 0.9.",
    )
    fragments: OrNone[int] = Field(
        default=None,
        description="parts of the parameters that streaming exchanges in turn. none: 4.",
    )
    overlap: OrNone[int] = Field(
        default=None,
        description="steps during which an exchange of streaming travels, below --sync.every. "
        "none: 1.",
    )
    mix: OrNone[float] = Field(
        default=None,
        description="part of a node's own parameters that streaming keeps in an exchange. "
        "none: 0.5.",
    )
    bits: OrNone[int] = Field(
        default=None,
        description="bits of each element that streaming sends, 4 or 32. none: 4.",
    )
    density: OrNone[float] = Field(
        default=None,
        description="part of the elements that sparseloco sends. none: 0.015625, 64 of 4096.",
    )
    max_staleness: int = Field(
        default=0,
        description="rounds (of --sync.every steps) by which a node of local-sgd, diloco and "
        "sparseloco may be ahead of what the others have sent, before it waits for them. 0: every "
        "node waits in each exchange.",
    )

    @model_validator(mode="after")
    def _check_mode(self) -> "SyncConfig":
        for one in fields(self):
            value = getattr(self, one.name)
            modes = [m for m, kind in _DESCRIPTIONS.items() if one.name in _options(kind)]
            unset = 0 if one.name in ("warmup", "max_staleness") else None
            if one.name == "mode" or value == unset or self.mode in modes:
                continue
            others = " or ".join(filter(None, [", ".join(modes[:-1]), modes[-1]]))
            raise ValueError(
                f"--sync.{one.name.replace('_', '-')} {value}: has no effect in --sync.mode "
                f"{self.mode}; give --sync.mode {others}, or leave it out"
            )
        if self.mode != "every-step" and self.every is None:
            raise ValueError(
                f"--sync.mode {self.mode}: needs the steps between exchanges; give --sync.every, "
                "such as 50"
            )
        try:
            self.description  # noqa: B018 - it raises
        except ValueError as error:
            name, words = str(error).split(" ", 1)
            raise ValueError(f"--sync.{name.replace('_', '-')} {words}") from None
        return self

    @property
    def description(self) -> LocalSGD | None:
        """The argument `sync` of `world.optimizer`; None for every-step."""
        if self.mode == "every-step":
            return None
        kind = _DESCRIPTIONS[self.mode]
        given = {k: v for k, v in vars(self).items() if k in _options(kind) and v is not None}
        return kind(**given)


def _options(kind: type[LocalSGD]) -> list[str]:
    """Return the names of the options that have an effect."""
    return [one.name for one in fields(kind) if one.name not in kind.refused]
