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
from mntrain.data.sample_digest import detached
from mntrain.rank_info import available_memory
from mntrain.tasks import Loss, Losses
from mntrain.train.compiling import recompute_regions
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

    Empty if it can, and where it is not tried: for a stream, on a rank without samples, with a task
    and a model that `copies` refuses, and if memory is short for copies by `ranks` on the node.
    Copies run forward and backward, without a trace. A loss that is not finite is no failure here.
    Raises ValueError with the line if the GPU is of no use afterwards.
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
    try:
        _train_once(replace(trial, task=task, model=model), on)
    except ValueError as error:
        return "" if _lacks_memory(error.__cause__) else str(error)
    return ""


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
    needed = 2 * sum(parameter.nbytes for parameter in model.parameters())
    needed += sum(buffer.nbytes for buffer in model.buffers())
    needed *= ranks
    return available is None or needed <= available / 2


def _lacks_memory(error: BaseException | None) -> bool:
    """Return whether an exception is for lack of memory, which training may have without copies."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    text = str(error)
    words = ("DefaultCPUAllocator", "ALLOC", "out of memory")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


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
