"""Options of the division of work between ranks of unequal speed."""

import math
import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from mntrain.config_types import STRICT, OrNone, parse_names
from mntrain.sync import SyncConfig

_OVERHEAD_TARGET = 0.10
# Under a policy by which nodes exchange parameters, unless options of --sync say more.
_EVERY, _WARMUP, _MAX_STALENESS = 20, 20, 2
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

    mode: OrNone[Literal["off", "throughput", "auto", "cadence"]] = Field(
        default=None,
        description="off: equal shares of each batch. throughput: in proportion to the speed of "
        "each rank, measured while training. auto: throughput, if matrix products at the start "
        "say that it could make training 1.2 times as fast. cadence: whole micro-batches, of which "
        "the slowest rank has 10 in a step and faster ranks more; --train.batch-size is not used. "
        "none: off, or throughput with a --balance.policy.",
    )
    policy: OrNone[Literal["sync", "cadence", "async"]] = Field(
        default=None,
        description="--balance.mode throughput, and how nodes whose shares differ work together. "
        "sync: they average gradients in every step. cadence: parameters, every 20 steps, weighted "
        "by the samples since (--sync.mode local-sgd). async: the same, but a node waits only for "
        "what others have sent two exchanges before (--sync.max-staleness 2, --sync.warmup 20). "
        "--sync.mode and --sync.every replace local-sgd and 20. none: as other options say.",
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
        if self.policy and self.mode not in (None, "throughput"):
            raise ValueError(
                f"--balance.policy {self.policy}: divides work as --balance.mode throughput does, "
                f"not as {self.mode}; leave one of the two out"
            )
        if self.mode is None:
            object.__setattr__(self, "mode", "throughput" if self.policy else "off")
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

    def sync_of_policy(self, sync: SyncConfig) -> SyncConfig:
        """Return how nodes exchange under the policy, if any; `sync` is what options say.

        It has a mode. Raises ValueError for options that contradict the policy or each other.
        """
        if conflict := self._conflict(sync):
            raise ValueError(f"--balance.policy {self.policy}: {conflict}")
        chosen: dict[str, Any] = {}
        if sync.mode is None:
            rare = self.policy in ("cadence", "async")
            chosen = {"mode": "local-sgd" if rare else "every-step"}
            if rare and sync.every is None:
                chosen["every"] = _EVERY
        if self.policy == "async":
            chosen["warmup"] = sync.warmup or _WARMUP
            chosen["max_staleness"] = sync.max_staleness or _MAX_STALENESS
        try:
            return replace(sync, **chosen)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None

    def _conflict(self, sync: SyncConfig) -> str:
        """Return why options contradict the policy, and what to do about it; empty if none do."""
        if self.policy and sync.mode == "auto":
            return (
                "says how nodes exchange, and --sync.mode auto chooses it; give --balance.mode "
                "throughput instead of the policy, or leave out --sync.mode"
            )
        if self.policy in ("cadence", "async") and sync.mode == "every-step":
            return (
                "nodes average parameters every few steps, and with --sync.mode every-step they "
                "average gradients; give --balance.policy sync, or leave out --sync.mode (none)"
            )
        if self.policy == "sync" and sync.mode not in (None, "every-step"):
            return (
                f"averages gradients in every step, and --sync.mode {sync.mode} does not; give "
                "--balance.policy cadence, or leave out --sync.mode"
            )
        if self.policy == "cadence" and sync.max_staleness:
            return (
                f"nodes wait for each other, and with --sync.max-staleness {sync.max_staleness} "
                "they do not; give --balance.policy async, or leave out --sync.max-staleness"
            )
        if self.policy == "async" and sync.mode == "streaming":
            return (
                "nodes do not wait for each other, which --sync.mode streaming cannot do; give "
                "another mode, or --balance.policy cadence"
            )
        return ""
