"""What a trial of a task's first step works on: copies of the task and its model."""

import copy
import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from mntrain.checkpoint import random_states, set_random_states
from mntrain.tasks import Loss, Losses, Task
from mntrain.train.data_digest import detached
from mntrain.train.job_data import JobData

_SMALL_BYTES = 1 << 20  # of a tensor that a task holds


@dataclass(frozen=True)
class Trial:
    """A task and its new model, and how a job trains them."""

    task: Task
    name: str  # what --task names the task
    model: nn.Module  # on the rank's device
    data: JobData
    done: int  # steps before the one whose samples are used
    floats: torch.dtype | None  # dtype of the batches' floating-point tensors; None: as they are
    autocast: torch.dtype | None
    recompute: bool


@contextmanager
def without_trace(model: nn.Module, on: torch.device) -> Iterator[None]:
    """Restore random generators and absent gradients after the block, and free its memory."""
    states = random_states(on)
    without = [p for p in model.parameters() if p.grad is None]
    try:
        yield
    finally:
        set_random_states(states, on)
        for parameter in without:
            parameter.grad = None
        gc.collect()
        if on.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(on)


def copies(task: Task, model: nn.Module) -> tuple[Task, nn.Module]:
    """Return copies of a task and a model, which share no module; see `copy_task`."""
    known: dict[int, Any] = {}
    copied_model = copy.deepcopy(model, known)
    copied_task = copy_task(task)
    for name, value in vars(task).items():
        if _holds_module(value):
            vars(copied_task)[name] = copy.deepcopy(value, known)
    return copied_task, copied_model


def _holds_module(value: Any) -> bool:
    """Return whether an object is a module, or a container of some."""
    if isinstance(value, list | tuple | dict):
        items = value.values() if isinstance(value, dict) else value
        return any(isinstance(item, nn.Module) for item in items)
    return isinstance(value, nn.Module)


def copy_task(task: Task) -> Task:
    """Return a copy of a task. Modules that it holds are of no use in it.

    Containers and small tensors that the task holds are copied too, as those that count or average
    something are; what lies deeper in its other objects is shared.
    """
    copied: Task = detached(task)
    attributes = vars(copied)
    for name, value in vars(task).items():
        if isinstance(value, Tensor) and value.nbytes <= _SMALL_BYTES:
            attributes[name] = value.detach().clone()
        elif isinstance(value, list | dict | set | deque) and attributes[name] is value:
            attributes[name] = copy.copy(value)
    return copied


def total_of(loss: Loss | Losses) -> Tensor | None:
    """Return the tensor to call backward on, without weights; None for a loss over no items."""
    if isinstance(loss, Loss):
        return loss.mean if loss.count else None
    values = [torch.as_tensor(part.value) for part in loss.parts.values() if part.count]
    return reduce(torch.add, values) if values else None
