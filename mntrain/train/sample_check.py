"""A trial of a task's data at the start.

Of the validation data, since the first evaluation comes much later; of the training data, since an
error is one line here, and a traceback in the first step.
"""

import copy
import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import default_collate

from mntrain import device, tasks
from mntrain.checkpoint import random_states, set_random_states
from mntrain.rank_info import available_memory
from mntrain.tasks import Loss, Losses
from mntrain.train.compiling import recompute_regions
from mntrain.train.data_digest import detached
from mntrain.train.job_data import JobData
from mntrain.train.part_counts import PartCounts
from mntrain.train.trial import Trial, copies, total_of, without_trace


@torch.no_grad()
def check_validation(
    task: tasks.Task,
    model: nn.Module,
    data: JobData,
    name: str,
    *,
    floats: torch.dtype | None,
    autocast: torch.dtype | None,
) -> dict[str, Loss | Losses]:
    """Return the loss of one micro-batch of each validation set, as evaluations will. Local.

    They are by the names of the sets. The dtypes are those of the batches' floating-point tensors
    and of autocast, None for none. Modules and random generators are left as they were. Raises
    ValueError for a task that fails or returns no Loss, with the error and its line; `name` is what
    --task names the task.
    """
    on = next((p.device for p in model.parameters()), torch.device("cpu"))
    task = copy.copy(task)  # one that counts its calls, say, must not count this one
    training = {module: module.training for module in model.modules()}
    states = random_states(on)
    losses: dict[str, Loss | Losses] = {}
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
            losses[which] = loss
    finally:
        set_random_states(states, on)
        for module, mode in training.items():
            module.training = mode
    return losses


def try_training(trial: Trial, on: torch.device, ranks: int) -> str:
    """Return in one line why one micro-batch of the training data cannot be trained on. Local.

    Empty if it can, and where it is not tried: for a stream, on a rank without samples, with a
    model that cannot be copied, and if memory is short for copies by `ranks` on the node. Copies
    run forward and backward, without a trace. If they fail, the task and the model do so
    themselves, since copies may lack what both share, such as a list that a hook of the model
    fills. If these succeed, the task has seen one call of `loss` more. A loss that is not finite is
    no failure here. Raises ValueError with the line if the GPU is of no use afterwards.
    """
    failure = ""
    try:
        with without_trace(trial.model, on):
            failure = _training_failure(trial, on, ranks)
    except RuntimeError as error:
        if not failure:
            raise
        raise ValueError(failure) from error
    return failure


def _training_failure(trial: Trial, on: torch.device, ranks: int) -> str:
    if trial.data.stream or not _has_room(trial.model, on, ranks):
        return ""
    try:
        task, model = copies(trial.task, trial.model)
        detached(trial.data.datasets["training"])
        if trial.recompute:
            recompute_regions(task.regions(model))
    except Exception:  # what cannot be copied can be trained nevertheless
        return ""
    failure = _failure(replace(trial, task=task, model=model), on)
    if not failure or _is_lost(on):
        return failure
    buffers = {name: buffer.clone() for name, buffer in trial.model.named_buffers()}
    failure = _failure(trial, on)
    if not failure:
        with torch.no_grad():
            for name, buffer in trial.model.named_buffers():
                if name in buffers and buffer.shape == buffers[name].shape:
                    buffer.copy_(buffers[name])
    return failure


def _failure(trial: Trial, on: torch.device) -> str:
    """Return in one line why a micro-batch cannot be trained on; empty if only memory lacks."""
    try:
        _train_once(trial, on)
    except ValueError as error:
        return "" if _lacks_memory(error.__cause__) else str(error)
    return ""


def _is_lost(on: torch.device) -> bool:
    """Return whether a GPU is of no use after an error."""
    try:
        if on.type == "cuda":
            torch.cuda.synchronize(on)
    except RuntimeError:
        return True
    return False


def _train_once(trial: Trial, on: torch.device) -> None:
    """Run forward and backward of a micro-batch. Raises ValueError with the reason in one line."""
    task, name, which = trial.task, trial.name, "samples of the training data"
    with _explained(task, name, "a sample of the training data cannot be read"):
        count, samples = trial.data.first_micro_batch(trial.done)
    if not count:
        return
    with _explained(task, name, f"collate fails on {which}"):
        batch = (task.collate or default_collate)(samples)
    with _explained(task, name, f"counts() fails on {which}"):
        counts = task.counts(batch)
    with _explained(task, name, f"loss() fails on {which}"):
        batch = device.move(batch, on, trial.floats)
        dtype = trial.autocast
        with torch.autocast(on.type, dtype=dtype) if dtype else nullcontext():
            loss: Any = task.loss(trial.model, batch)
    try:
        PartCounts(task, name, _no_group).check(counts, loss)
    except (TypeError, ValueError) as error:
        raise ValueError(str(error)) from error
    with _explained(task, name, f"loss() fails on {which}"):  # on a GPU, errors come later
        total = total_of(loss)
        if total is None or not total.isfinite():
            return
    if not total.requires_grad:
        raise ValueError(
            f"--task {name}: loss() returns a loss without a gradient for {which}: compute it from "
            "the output of the model, without detach(), item() or torch.no_grad()"
        )
    with _explained(task, name, f"backward of the loss fails on {which}"):
        total.backward()
        if on.type == "cuda":
            torch.cuda.synchronize(on)


def _no_group() -> NoReturn:
    raise AssertionError("a trial is part of no step, and communicates nothing")


def _has_room(model: nn.Module, on: torch.device, ranks: int) -> bool:
    """Return whether half of the free memory holds copies and gradients for so many ranks. Local.

    True on a GPU, where an allocation that does not fit is an error, and does not end the process.
    """
    available = available_memory() if on.type == "cpu" else None
    needed = 2 * ranks * sum(parameter.nbytes for parameter in model.parameters())
    return available is None or needed <= available / 2


def _lacks_memory(error: BaseException | None) -> bool:
    """Return whether an exception is for lack of memory, which training may have without copies."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in text or "ALLOC" in text)


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
