"""Descriptions of how nodes exchange parameters, if not the gradients of every step.

A node is one replica: its ranks average gradients in every step. `world.optimizer(sync=...)` binds
a description to the ranks of a job. Importing this module needs neither torch nor MPI.
"""

from dataclasses import field, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from mntrain.options.types import STRICT, OrNone

if TYPE_CHECKING:
    from zero.collectives import Collectives
    from zero.exchange.exchange import Exchange

# ruff: noqa: PLC0415 - zero imports torch, which --help does without

Positive = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Part = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, config=STRICT)
class LocalSGD:
    """Nodes average their parameters every `every` steps, after `warmup` synchronous ones.

    A round is the steps between two exchanges. With a `max_staleness`, nodes do not wait for each
    other: one that ends a round goes on while it is exchanged, and waits only for the round that is
    `max_staleness` rounds older (`zero.exchange.exchange`).

    With `weighted`, a node counts in an exchange in proportion to the samples of its steps since
    the last one (what `optimizer.share`, `backward(weight=...)` or `world.shard` say of them), for
    nodes that are not equally fast; else all nodes count the same.

    Source: post-local SGD (Lin et al., ICLR 2020, arXiv 1808.07217), local SGD (Stich, ICLR 2019,
    arXiv 1805.09767). Raises pydantic's ValidationError, a ValueError, for numbers that cannot be.
    """

    every: Positive
    warmup: Whole = 0
    max_staleness: Whole = field(default=0, kw_only=True)
    weighted: bool = field(default=False, kw_only=True)

    mode: ClassVar[str] = "local-sgd"
    summary: ClassVar[str] = "by their mean"  # of the parameters at an exchange

    def bind(
        self, world: "Collectives", node: "Collectives", cross: "Collectives", *, stage: int
    ) -> "Exchange":
        """Return the exchange over these groups of ranks, for an optimizer of a stage. Local."""
        from zero.exchange.exchange import Exchange
        from zero.exchange.node_means import NodeMeans

        options = {n: getattr(self, n) for n in ("every", "warmup", "weighted", "max_staleness")}
        means = NodeMeans(node, cross, sharded=stage > 0)
        made = Exchange(world, means, **options, **self._parts())
        made.mode = self.mode
        return made

    def _parts(self) -> dict[str, Any]:
        """Return the parts of which the exchange is composed (`zero.exchange.exchange`)."""
        from zero.exchange.exchange import OuterSGD

        return {"outer": OuterSGD()} if self.max_staleness else {}


@dataclass(frozen=True, config=STRICT)
class DiLoCo(LocalSGD):
    """Steps of Nesterov momentum towards the mean of the nodes' parameters, every `every` steps.

    Source: DiLoCo (Douillard et al., 2023, arXiv 2311.08105), with its outer optimizer's defaults.
    """

    outer_lr: Rate = 0.7
    outer_momentum: Part = 0.9

    mode: ClassVar[str] = "diloco"
    summary: ClassVar[str] = "by a step of an outer optimizer"

    def _parts(self) -> dict[str, Any]:
        from zero.exchange.exchange import OuterSGD

        return {"outer": OuterSGD(self.outer_lr, self.outer_momentum)}


@dataclass(frozen=True, config=STRICT)
class SparseLoCo(LocalSGD):
    """Nodes exchange the largest of their changes every `every` steps, and keep the rest.

    `density` is the part that is sent of each 4,096 elements of a parameter, in 2 bits. A node adds
    its changes to 0.95 times what it has not sent yet.

    Source: SparseLoCo (Sarfi et al., 2025, arXiv 2508.15706).
    """

    outer_lr: Rate = 1.0
    density: Annotated[float, Field(gt=0, le=1)] = 64 / 4096

    mode: ClassVar[str] = "sparseloco"
    summary: ClassVar[str] = "by the largest changes in 2 bits"

    def _parts(self) -> dict[str, Any]:
        from zero.comm_hooks.codes import ChunkCode
        from zero.exchange.exchange import OuterSGD

        return {"outer": OuterSGD(self.outer_lr), "code": ChunkCode(self.density)}


_DESCRIPTIONS = {kind.mode: kind for kind in (LocalSGD, DiLoCo, SparseLoCo)}


def _names(mode: str) -> set[str]:
    """Return the names of a description's fields, of which those of `SyncConfig` are options."""
    return {one.name for one in fields(_DESCRIPTIONS[mode])}


@dataclass(frozen=True, config=STRICT)
class SyncConfig:
    """Exchanges between nodes: the gradients of every step, or parameters every few steps."""

    mode: Literal["every-step", *_DESCRIPTIONS] = Field(  # type: ignore[valid-type]
        default="every-step",
        description="every-step: average gradients over all ranks. The others average them within "
        "each node, and every --sync.every steps exchange parameters between nodes: "
        f"{', '.join(f'{mode} {kind.summary}' for mode, kind in _DESCRIPTIONS.items())}.",
    )
    every: OrNone[int] = Field(
        default=None,
        description="steps between exchanges, if not after every step. none: not given.",
    )
    warmup: int = Field(
        default=0, description="synchronous steps at the start of the run, if exchanges are rarer."
    )
    outer_lr: OrNone[float] = Field(
        default=None,
        description="learning rate of the outer optimizer of diloco (none: 0.7), and of sparseloco "
        "(none: 1).",
    )
    outer_momentum: OrNone[float] = Field(
        default=None,
        description="Nesterov momentum of the outer optimizer of diloco. none: 0.9.",
    )
    density: OrNone[float] = Field(
        default=None,
        description="part of the elements that sparseloco sends. none: 0.015625, 64 of 4096.",
    )
    max_staleness: int = Field(
        default=0,
        description="rounds (of --sync.every steps) by which a node may be ahead of what the "
        "others have sent, before it waits for them. 0: every node waits in each exchange.",
    )

    @model_validator(mode="after")
    def _check_mode(self) -> "SyncConfig":
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            modes = [mode for mode in _DESCRIPTIONS if name in _names(mode)]
            if name == "mode" or value == getattr(SyncConfig, name) or self.mode in modes:
                continue
            others = " or ".join(filter(None, [", ".join(modes[:-1]), modes[-1]]))
            raise ValueError(
                f"--sync.{name.replace('_', '-')} {value}: has no effect in --sync.mode "
                f"{self.mode}; give --sync.mode {others}, or leave it out"
            )
        if self.mode != "every-step" and self.every is None:
            raise ValueError(
                f"--sync.mode {self.mode}: needs the steps between exchanges; give --sync.every, "
                "such as 50"
            )
        try:
            self.description  # noqa: B018 - it raises
        except ValidationError as error:
            details = error.errors()[0]
            name = str(details["loc"][0]).replace("_", "-")
            raise ValueError(f"--sync.{name}: {details['msg']}, not {details['input']!r}") from None
        return self

    @property
    def description(self) -> LocalSGD | None:
        """The argument `sync` of `world.optimizer`; None for every-step."""
        if self.mode == "every-step":
            return None
        options = {name: value for name, value in vars(self).items() if name in _names(self.mode)}
        return _DESCRIPTIONS[self.mode](**{n: v for n, v in options.items() if v is not None})
