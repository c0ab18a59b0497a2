"""What the names of --train.precision stand for."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Precision:
    """In which dtypes a model is kept and computes, and whether its loss is scaled."""

    parameters: torch.dtype | None = None  # and buffers, and gradients; None: as the task made them
    autocast: torch.dtype | None = None  # of the operations that torch thinks fit, if any
    loss_scale: Literal["dynamic"] | None = None

    def computing(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context to run forward in. Local."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(autocast=torch.bfloat16),
    "bf16-pure": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16, loss_scale="dynamic"),  # small gradients would vanish
}
