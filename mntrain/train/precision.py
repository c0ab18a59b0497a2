"""Dtypes of a job's model and of its forward."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from mntrain import device
from mntrain.tasks import Loss, Losses, Task


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model and of its forward, and the scaling of its loss, by --train.precision."""

    parameters: torch.dtype | None = None  # and of buffers and gradients; None: the task's choice
    autocast: torch.dtype | None = None  # None: forward runs in the parameters' dtype
    loss_scale: Literal["dynamic"] | None = None

    def loss(self, task: Task, model: nn.Module, batch: Any, on: torch.device) -> Loss | Losses:
        """Return the task's loss of a micro-batch, which is moved to the model's device. Local."""
        moved = device.move(batch, on, self.parameters)
        with torch.autocast(on.type, dtype=self.autocast) if self.autocast else nullcontext():
            return task.loss(model, moved)


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(autocast=torch.bfloat16),
    "bf16-pure": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16, loss_scale="dynamic"),  # small gradients would underflow
}
