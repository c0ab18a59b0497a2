"""A trial of the validation data at the start, since the first evaluation comes much later."""

import copy
import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from mntrain import device, tasks
from mntrain.checkpoint import random_states, set_random_states
from mntrain.train.job_data import JobData


@torch.no_grad()
def check_validation(
    task: tasks.Task,
    model: nn.Module,
    data: JobData,
    name: str,
    *,
    floats: torch.dtype | None,
    autocast: torch.dtype | None,
) -> None:
    """Compute the loss of one micro-batch of each validation set, as evaluations will. Local.

    The dtypes are those of the batches' floating-point tensors
    and of autocast, None for none. Modules and random generators are left as they were. Raises
    ValueError for a task that fails or returns no Loss, with the error and its line; `name` is what
    --task names the task.
    """
    on = next((p.device for p in model.parameters()), torch.device("cpu"))
    task = copy.copy(task)  # one that counts its calls, say, must not count this one
    training = {module: module.training for module in model.modules()}
    states = random_states(on)
    model.eval()
    try:
        for which in data.validation_sets:
            label = f"the validation data {which}".strip()
            with _explained(task, name, f"a sample of {label} cannot be read"):
                samples = data.first_validation_samples(which)
            with _explained(task, name, f"collate fails on samples of {label}"):
                batch = (task.collate or default_collate)(samples)
            with _explained(task, name, f"loss() fails on samples of {label}"):
                batch = device.move(batch, on, floats)
                with torch.autocast(on.type, dtype=autocast) if autocast else nullcontext():
                    loss: Any = task.loss(model, batch)
            try:
                tasks.check_loss(loss, name)
            except TypeError as error:
                raise ValueError(str(error)) from error
    finally:
        set_random_states(states, on)
        for module, mode in training.items():
            module.training = mode


@contextmanager
def _explained(task: tasks.Task, name: str, what: str) -> Iterator[None]:
    """Raise ValueError for an exception of the block: one line, with the line of the task."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = inspect.getsourcefile(type(task))
        frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
        text = str(error).partition("\n")[0]
        raise ValueError(
            f"--task {name}: {what}: {type(error).__name__}: {text} "
            f"({Path(frame.filename).name}, line {frame.lineno})"
        ) from error
