"""Error feedback: what a rank has not sent of its sums is added to what it sends next.

A step that is skipped must leave nothing: its gradients are dropped, with all that was sent of
earlier ones. So the residual of the last step that was taken is kept until the next one is:

    settled    of the last step that was taken
    latest     of the last reduction; the same tensor, unless a step is open
    open       of the reduction in progress

Sums are in units that change: gradients are multiplied by their batch's weight and by the loss
scale, and divided by a number that all ranks know only when the reduction ends. A mean is a sum
times `multiplier` / `divisor`. Residuals are added in units of means, so that all means together
are those without compression: what is added is scaled as if the divisor were that of the last
reduction, and `reduced` moves what the actual one adds or lacks into the residual.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019, arXiv 1901.09847.
"""

from typing import Any

import torch
from torch import Tensor


class Residual:
    """The residual of one lane of a bucket, in `dtype`. Takes twice its size from the first use."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._settled = self._latest = _Sum(torch.zeros(numel, dtype=dtype, device=device))
        self._spare: Tensor | None = torch.empty_like(self._settled.tensor)
        self._open: Tensor | None = None
        self._multiplier = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return 2 * self._settled.tensor.nbytes

    def add(self, lane: Tensor, multiplier: float) -> Tensor:
        """Return a lane's sums plus the residual, to be overwritten by what is not sent of them.

        `multiplier` is that of the sums, the same in all calls of a reduction.
        """
        if self._open is not None:  # another micro-batch of the same reduction
            return self._open.add_(lane)
        base, self._multiplier = self._latest, multiplier
        total = torch.empty_like(base.tensor) if self._spare is None else self._spare
        torch.mul(base.tensor, base.multiplier / multiplier, out=total).add_(lane)
        self._open, self._spare = total, None
        return total

    def reduced(self, divisor: float) -> None:
        """End a reduction whose sums are divided by `divisor`."""
        total, base, self._open = self._open, self._latest, None
        if total is None:
            return
        # An infinity or a NaN has been sent, and is not sent again.
        total.nan_to_num_(0.0, 0.0, 0.0)
        if base.divisor not in (0.0, divisor):
            ratio = base.multiplier / self._multiplier
            total.add_(base.tensor, alpha=ratio * (divisor / base.divisor - 1.0))
        self._latest = _Sum(total, self._multiplier, divisor)
        if base is not self._settled:
            self._spare = base.tensor

    def settle(self, *, taken: bool) -> None:
        """End a step, or drop it: what its reductions have left counts, or never was."""
        if self._open is not None:  # a reduction that has not ended
            self._spare, self._open = self._open, None
        if self._latest is self._settled:
            return
        dropped = self._settled if taken else self._latest
        self._spare = dropped.tensor
        self._settled = self._latest = self._latest if taken else self._settled

    def state_dict(self) -> dict[str, Any]:
        """Return the residual of the last step that was taken."""
        settled = self._settled
        return {
            "residual": settled.tensor,
            "multiplier": settled.multiplier,
            "divisor": settled.divisor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises ValueError for one of another length."""
        tensor = self._settled.tensor
        if state["residual"].shape != tensor.shape:
            raise ValueError(
                f"the residual has {state['residual'].numel()} elements, not {tensor.numel()}"
            )
        self._settled = self._latest = _Sum(
            tensor.copy_(state["residual"]), float(state["multiplier"]), float(state["divisor"])
        )


class _Sum:
    """Sums that were not sent, and what makes means of them; a divisor of 0 stands for none."""

    def __init__(self, tensor: Tensor, multiplier: float = 1.0, divisor: float = 0.0) -> None:
        self.tensor, self.multiplier, self.divisor = tensor, multiplier, divisor
