"""Options of the division of work between ranks of unequal speed."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from mntrain.options.types import STRICT, OrNone, parse_names

# Options of `BalanceConfig`, and the modes in which they have an effect.
_MODES = {
    "speed": ("throughput", "cadence"),
    "overhead_target": ("cadence",),
    "max_anchor": ("cadence",),
    "max_rank_grad_norm": ("throughput", "cadence"),
}


def _parse_speeds(value: Any) -> Any:
    """Return words RANK:RATIO. Raises ValueError for others, and for a rank that is there twice."""
    names = parse_names(value)
    words = names if isinstance(names, tuple) else (names,)
    ranks = []
    for word in words:
        rank, _, ratio = str(word).partition(":")
        try:
            valid = 0 < float(ratio) < math.inf
        except ValueError:
            valid = False
        if not valid or not rank.isdecimal():
            raise ValueError(
                f"must be RANK:RATIO with a ratio above 0, such as 3:0.5 ({word!r} is not)"
            )
        if int(rank) in ranks:
            raise ValueError(f"must have each rank once (rank {int(rank)} is there twice)")
        ranks.append(int(rank))
    return words


@dataclass(frozen=True, config=STRICT)
class BalanceConfig:
    """The division of work between ranks of unequal speed."""

    mode: Literal["off", "throughput", "cadence"] = Field(
        default="off",
        description="off: equal shares of each batch. throughput: in proportion to the speed of "
        "each rank, measured while training. cadence: whole micro-batches, of which "
        "the slowest rank has 10 in a step and faster ranks more; --train.batch-size is not used.",
    )
    speed: Annotated[tuple[str, ...], BeforeValidator(_parse_speeds)] = Field(
        default=(),
        description="relative speeds that are known before, as RANK:RATIO; of other ranks 1. They "
        "hold until speeds are measured.",
    )
    overhead_target: float = Field(
        default=0.10,
        ge=0.01,
        le=0.50,
        description="part of the time of computing that communication may take in cadence: the "
        "slowest rank's number of micro-batches grows or shrinks until it does.",
    )
    max_anchor: OrNone[int] = Field(
        default=None,
        ge=0,
        description="largest number of micro-batches of the slowest rank in a step of cadence. 0: "
        "no limit but the samples of an epoch. none: the largest with which an epoch has 10 steps.",
    )

    max_rank_grad_norm: OrNone[float] = Field(
        default=None,
        gt=0,
        description="norm to clip each rank's own mean gradient of a step to, before the reduction;"
        " then no gradients are sent during backward. Not at stage 2. none: no clipping.",
    )

    @model_validator(mode="after")
    def _check_mode(self) -> "BalanceConfig":
        for name, modes in _MODES.items():
            value = getattr(self, name)
            if self.mode in modes or value == type(self).__dataclass_fields__[name].default.default:
                continue
            words = " ".join(value) if isinstance(value, tuple) else value
            raise ValueError(
                f"--balance.{name.replace('_', '-')} {words}: has no effect in --balance.mode "
                f"{self.mode}; give --balance.mode {' or '.join(modes)}, or leave it out"
            )
        return self

    @property
    def speeds(self) -> dict[int, float]:
        """The given speeds by rank."""
        pairs = (word.partition(":") for word in self.speed)
        return {int(rank): float(ratio) for rank, _, ratio in pairs}
