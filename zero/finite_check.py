"""Whether this rank's own gradients were finite, before they were summed over ranks."""

import math

import torch
from torch import Tensor


class FiniteCheck:
    """Looks at gradients one by one, while they are in the cache: a sum that is finite is enough.

    The answer is needed only to say whose gradient it was that made a step fail; so where nobody
    will ask (`asked` is false), nobody looks.
    """

    def __init__(self, *, asked: bool) -> None:
        self._asked = asked
        self._here = True
        self._on_device: Tensor | None = None  # likewise, where to ask is to wait

    def look(self, gradient: Tensor) -> None:
        """Take one more into account."""
        if not self._asked:
            return
        if gradient.device.type != "cpu":
            wide = torch.promote_types(gradient.dtype, torch.float32)
            nothing = gradient.sum(dtype=wide) * 0  # or a NaN
            self._on_device = nothing if self._on_device is None else self._on_device + nothing
        elif not math.isfinite(float(gradient.sum())):  # which may be too large a number, too
            self._here = self._here and bool(gradient.isfinite().all())

    def reset(self) -> None:
        """Start anew."""
        self._here, self._on_device = True, None

    def __bool__(self) -> bool:
        """Whether all were, since `reset`. Waits for the device."""
        return self._here and (self._on_device is None or not float(self._on_device))
