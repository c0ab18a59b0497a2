"""Copies of a task and its model, for the trial of its first step."""

import copy
import gc
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mntrain.checkpoint import random_states, set_random_states
from mntrain.data.sample_digest import detached
from mntrain.tasks import Loss, Losses, Task
from mntrain.train.job_data import JobData

_SMALL_BYTES = 1 << 20  # of a tensor that a task holds
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (
    *(NoneType, bool, int, float, complex, str, bytes, np.generic, PurePath),
    *(torch.dtype, torch.device, type, BuiltinFunctionType, ModuleType, Dataset),
)


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
    """Return copies of a task and a model: a step with these changes nothing of the task and model.

    What the task and the dataset keep in global variables and in attributes of classes is not
    copied. Raises ValueError for a task and a model that may be tied together or to other objects:
    by hooks, methods and closures in a module, or by objects that the task holds, but for modules,
    datasets, generators, small tensors, and containers of plain values or modules.
    """
    for name, value in vars(task).items():
        if not _is_apart(value):
            raise ValueError(f"the task holds a {type(value).__name__} in {name}")
    held = (_modules_of(value) for value in vars(task).values())
    for module in {*model.modules(), *(m for top in chain(*held) for m in top.modules())}:
        if any(getattr(module, name) for name in _HOOKS) or any(
            map(_is_tied, vars(module).values())
        ):
            raise ValueError(f"a {type(module).__name__} of the model has a hook or a function")
    known: dict[int, Any] = {}
    copied_model = copy.deepcopy(model, known)
    copied_task = copy_task(task)
    for name, value in vars(task).items():
        if _modules_of(value):
            vars(copied_task)[name] = copy.deepcopy(value, known)
    return copied_task, copied_model


def _modules_of(value: Any) -> list[nn.Module]:
    """Return an object if it is a module, or the modules of a container."""
    return [item for item in _items(value) if isinstance(item, nn.Module)]


def _items(value: Any) -> list[Any]:
    """Return the items of a container, or the object itself."""
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple | set | frozenset | deque) else [value]


def _is_apart(value: Any) -> bool:
    """Return whether `copies` makes a copy of an attribute of a task, or nobody changes it."""
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes <= _SMALL_BYTES and not getattr(value, "requires_grad", False)
    if isinstance(
        value, random.Random | np.random.Generator | np.random.RandomState | torch.Generator
    ):
        return True
    return all(isinstance(item, nn.Module) or _is_plain(item) for item in _items(value))


def _is_plain(value: Any) -> bool:
    """Return whether an object has no state that a step changes, as those of this package."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    return isinstance(value, _PLAIN) or type(value).__module__.partition(".")[0] == "mntrain"


def _is_tied(value: Any) -> bool:
    """Return whether an attribute of a module is a function that may hold other objects."""
    closure = isinstance(value, FunctionType) and value.__closure__ is not None
    return closure or isinstance(value, MethodType | partial)


def copy_task(task: Task) -> Task:
    """Return a copy of a task. Modules that it holds are of no use in it.

    Containers, and small tensors and arrays, that the task holds are copied too, as those that
    count or average something are; what lies deeper in its other objects is shared.
    """
    copied: Task = detached(task)
    attributes = vars(copied)
    for name, value in vars(task).items():
        if isinstance(value, Tensor) and value.nbytes <= _SMALL_BYTES:
            attributes[name] = value.detach().clone()
        elif isinstance(value, np.ndarray) and value.nbytes <= _SMALL_BYTES:
            attributes[name] = value.copy()
        elif isinstance(value, list | dict | set | deque) and attributes[name] is value:
            attributes[name] = copy.copy(value)
    return copied


def total_of(loss: Loss | Losses) -> Tensor | None:
    """Return the tensor to call backward on, without weights; None for a loss over no items."""
    if isinstance(loss, Loss):
        return loss.mean if loss.count else None
    values = [torch.as_tensor(part.value) for part in loss.parts.values() if part.count]
    return reduce(torch.add, values) if values else None
