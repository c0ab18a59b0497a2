"""What 16-bit parameters need besides: fp32 master weights, fp32 gradients, a scaled loss."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from zero.kernels import Kernels
from zero.param_groups import is_positive
from zero.tensor_views import nbytes

# Source of the dynamic scale and of its defaults: Micikevicius et al., "Mixed Precision Training",
# 2018 (arXiv 1710.03740), and torch.amp.GradScaler.
FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # good steps in a row after which the scale doubles
LEAST_SCALE = 2.0**-24  # an overflow at a smaller one is none of the scale's


def needs_master(dtype: torch.dtype) -> bool:
    """Whether parameters of a dtype are updated through a master copy in fp32."""
    return dtype.itemsize < torch.float32.itemsize


def widened(shard: Tensor, factor: float, room: Tensor, kernels: Kernels) -> Tensor:
    """A flat 16-bit tensor times a factor, in fp32: in the memory of `room` if it fits, or new.

    `room` is flat, and what it held is lost; `shard` may be a part of it.
    """
    size = shard.numel() * torch.float32.itemsize
    if nbytes(room) < size:
        wide = torch.empty_like(shard, dtype=torch.float32)
    else:
        wide = room.view(torch.uint8)[:size].view(torch.float32)
        shard = shard.clone()
    kernels.pack(shard, factor, wide)
    return wide


class LossScale:
    """By what a loss is multiplied before backward, so that small fp16 gradients do not vanish.

    None: by nothing. A number: always by that. "dynamic": by as much as does not overflow: halved
    (and the step skipped) after an overflow, doubled after 2000 good steps in a row. What it is
    told is agreed on, so it is the same on every rank.
    """

    def __init__(self, setting: float | Literal["dynamic"] | None) -> None:
        fixed = 1.0 if setting is None else setting
        self.dynamic = setting == "dynamic"
        if not self.dynamic and not (is_positive(fixed) and math.isfinite(float(fixed))):
            raise ValueError(
                f'loss_scale is {setting!r}: give None, "dynamic", or a finite number above 0'
            )
        self.value = FIRST_SCALE if self.dynamic else float(fixed)
        self._good_steps = 0

    def forgives(self) -> bool:
        """Whether an overflow is to be expected, and answered by a smaller scale."""
        return self.dynamic and self.value > LEAST_SCALE

    def shrink(self) -> None:
        """Answer an overflow."""
        self.value /= 2
        self._good_steps = 0

    def note_good_step(self) -> None:
        """Count a step without overflow."""
        self._good_steps += 1
        if self.dynamic and self._good_steps >= GROWTH_INTERVAL:
            self.value *= 2
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The scale, and how long it has lasted."""
        return {"dynamic": self.dynamic, "value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; between a fixed scale and another nothing changes."""
        if self.dynamic and state["dynamic"]:
            self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
