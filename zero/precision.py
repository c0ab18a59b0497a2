"""Dtypes of gradients and master weights, and the loss scale."""

import math
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from zero.losses import note_scale

FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # consecutive steps without overflow after which the scale doubles
LEAST_SCALE = 2.0**-24  # an overflow at a smaller scale is not caused by the scale
TRAVEL_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)


def is_16_bit(dtype: torch.dtype) -> bool:
    """Return whether a dtype is too narrow to update parameters in."""
    return dtype.itemsize < torch.float32.itemsize


def narrower(dtype: torch.dtype | None, own: torch.dtype) -> torch.dtype | None:
    """Return `dtype` if `own` can be rounded to it with smaller elements, else None."""
    if dtype is None or own.is_complex:
        return None
    return dtype if dtype.itemsize < own.itemsize else None


def master_dtype(own: torch.dtype, gather_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of master weights; None for parameters that are updated in place.

    Parameters have master weights where they are of 16 bits, or rounded to `gather_dtype`.
    """
    if is_16_bit(own) or narrower(gather_dtype, own):
        return torch.promote_types(own, torch.float32)
    return None


def check_travel_dtype(name: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless gradients or parameters can travel in a dtype."""
    if dtype not in TRAVEL_DTYPES:
        raise ValueError(f"{name} is {dtype!r}: choose one of {', '.join(map(str, TRAVEL_DTYPES))}")


def is_positive(value: object) -> bool:
    """Return whether a value is a number above 0, including infinity; True does not count."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0


class LossScale:
    """The factor of the loss that keeps small fp16 gradients from vanishing.

    None is a factor of 1, and a number is constant. "dynamic" halves the scale after an overflow,
    and doubles it after 2000 consecutive steps without one. Every rank sees the same overflows, so
    the scale is the same on every rank. Source of the defaults: torch.amp.GradScaler.
    """

    def __init__(self, setting: float | Literal["dynamic"] | None) -> None:
        fixed = 1.0 if setting is None else setting
        self.dynamic = setting == "dynamic"
        if not self.dynamic and not (is_positive(fixed) and math.isfinite(float(fixed))):
            raise ValueError(
                f'loss_scale is {setting!r}: give None, "dynamic", or a finite number above 0'
            )
        self.value = FIRST_SCALE if self.dynamic else float(fixed)
        self.scales = self.dynamic or self.value != 1.0  # the factor is not constantly 1
        self.applied = False  # whether a backward of a multiplied loss has begun, and not ended
        self._good_steps = 0

    def apply(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale, whose backward passes tell of it."""
        if not self.scales:
            return loss
        scaled = loss * self.value
        note_scale(scaled, self.value, self._note_applied)
        return scaled

    def _note_applied(self) -> None:
        self.applied = True

    def expect_applied(self) -> None:
        """Raise RuntimeError if no backward of a multiplied loss has begun."""
        if not self.applied:
            raise RuntimeError(
                "the optimizer has a loss_scale=, by which it divides the gradient, and the loss "
                "was not multiplied by it: call optimizer.scale(loss).backward(), or "
                "optimizer.backward(loss, weight=n)"
            )

    def shrink(self) -> bool:
        """Halve the scale after an overflow; return False if the scale cannot be the cause."""
        if not self.dynamic or self.value <= LEAST_SCALE:
            return False
        self.value /= 2
        self._good_steps = 0
        return True

    def note_good_step(self) -> None:
        """Count a step without overflow."""
        self._good_steps += 1
        if self.dynamic and self._good_steps >= GROWTH_INTERVAL:
            self.value *= 2
            self._good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of steps without overflow."""
        return {"dynamic": self.dynamic, "value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a dynamic scale; constant scales ignore the state."""
        if self.dynamic and state["dynamic"]:
            self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
