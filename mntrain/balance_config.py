"""Options of the division of work between ranks of unequal speed."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from mntrain.config_types import STRICT, OrNone, parse_names

_OVERHEAD_TARGET = 0.10
# Options of `BalanceConfig`, their defaults, and the modes in which they have an effect.
_MODES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "speed": ((), ("throughput", "cadence")),
    "overhead_target": (_OVERHEAD_TARGET, ("cadence",)),
    "max_anchor": (None, ("cadence",)),
    "max_rank_grad_norm": (None, ("throughput", "cadence")),
}


def _parse_speeds(value: Any) -> Any:
    """Return words RANK:RATIO. Raises ValueError for others, and for a rank that is there twice."""
    names = parse_names(value)
    words = names if isinstance(names, tuple) else (names,)
    ranks = set()
    for word in words:
        found = re.fullmatch(r"(\d+):(.+)", word) if isinstance(word, str) else None
        try:
            ratio = float(found[2]) if found else math.nan
        except ValueError:
            ratio = math.nan
        if found is None or not 0 < ratio < math.inf:
            raise ValueError(
                f"must be RANK:RATIO with a ratio above 0, such as 3:0.5 ({word!r} is not)"
            )
        if int(found[1]) in ranks:
            raise ValueError(f"must have each rank once (rank {int(found[1])} is there twice)")
        ranks.add(int(found[1]))
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
        default=_OVERHEAD_TARGET,
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
        for name, (default, modes) in _MODES.items():
            value = getattr(self, name)
            if self.mode in modes or value == default:
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
