"""Options of the division of work between ranks of unequal speed."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from mntrain.config_types import STRICT, parse_names


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
    """Shares of the batch for ranks of unequal speed."""

    mode: Literal["off", "throughput", "auto"] = Field(
        default="off",
        description="off: equal shares of each batch. throughput: in proportion to the speed of "
        "each rank, measured while training. auto: throughput, if matrix products at the start "
        "say that it could make training 1.2 times as fast.",
    )
    speed: Annotated[tuple[str, ...], BeforeValidator(_parse_speeds)] = Field(
        default=(),
        description="relative speeds that are known before, as RANK:RATIO; of other ranks 1. They "
        "hold until speeds are measured.",
    )

    @model_validator(mode="after")
    def _check_mode(self) -> "BalanceConfig":
        if self.speed and self.mode != "throughput":
            raise ValueError(
                f"--balance.speed {' '.join(self.speed)}: has no effect in --balance.mode "
                f"{self.mode}; "
                "give --balance.mode throughput, or leave it out"
            )
        return self

    @property
    def speeds(self) -> dict[int, float]:
        """The given speeds by rank."""
        pairs = (word.partition(":") for word in self.speed)
        return {int(rank): float(ratio) for rank, _, ratio in pairs}
