"""Options of the sharding of optimizer state and gradients."""

from typing import Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from mntrain.config_types import STRICT


@dataclass(frozen=True, config=STRICT)
class ZeroConfig:
    """Sharding over the ranks."""

    stage: int = Field(
        default=0,
        ge=0,
        le=2,
        description="ZeRO stage. 0: no sharding. 1: the optimizer's state. 2: gradients too.",
    )
    partition: Literal["element", "parameter"] = Field(
        default="element",
        description="unit of sharding. element: any elements. parameter: whole parameters, which "
        "some optimizers need.",
    )
    shard_by: Literal["equal", "memory"] = Field(
        default="equal",
        description="size of shards. equal: the same on all ranks. memory: in proportion to the "
        "memory that is free at the start on each rank's GPU, or on its host, which ranks share.",
    )

    @model_validator(mode="after")
    def _check_shard_by(self) -> "ZeroConfig":
        if self.shard_by != "equal" and self.stage == 0:
            raise ValueError(
                f"--zero.shard-by {self.shard_by}: has no effect at --zero.stage 0; give "
                "--zero.stage 1 or 2, or leave it out"
            )
        return self
