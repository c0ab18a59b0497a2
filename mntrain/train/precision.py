"""The names of --train.precision and the dtypes they stand for."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model and of its forward, and the scaling of its loss."""

    parameters: torch.dtype | None = None  # and of buffers and gradients; None: the task's choice
    autocast: torch.dtype | None = None  # None: forward runs in the parameters' dtype
    loss_scale: Literal["dynamic"] | None = None

    def autocast_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context to run forward in. Local."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(autocast=torch.bfloat16),
    "bf16-pure": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16, loss_scale="dynamic"),  # small gradients would underflow
}
