"""Evaluations of a job: their trial at the start, their metric, and when they end the run."""

import copy
import inspect
import math
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from mntrain import device, tasks
from mntrain.checkpoint import random_states, set_random_states
from mntrain.metrics.registry import StepRecord
from mntrain.train.job_data import JobData
from mntrain.train.step_means import GlobalMeans

EVAL_LOSS = "eval_loss"


def merge_sets(by_set: Mapping[str, GlobalMeans]) -> tuple[float, dict[str, float]]:
    """Return the loss over the items of all validation sets, and the metrics of each by its name.

    Of several parts (`Losses`), the loss is the sum over parts of factor x mean over the part's
    items of all sets. The metrics of an only set without a name keep their names.
    """
    if set(by_set) == {""}:
        return by_set[""].loss, by_set[""].metrics
    totals: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    metrics: dict[str, float] = {}
    for name, means in by_set.items():
        named = {"loss": means.loss, **means.metrics}
        metrics |= {f"{name} {metric}": value for metric, value in named.items()}
        for part, (value, items) in means.addends.items():
            totals[part] += value * items
            counts[part] += items
    return sum(totals[part] / counts[part] for part in totals), metrics


class BestMetric:
    """The metric of an evaluation that says which one is best, by --checkpoint.best.

    `text` is "eval_loss", or the name of a metric of the task, such as "accuracy:max".
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._name, _, mode = text.partition(":")
        self._sign = -1.0 if mode == "max" else 1.0

    def score(self, record: StepRecord) -> float | None:
        """Return the score of a step's evaluation, of which the lowest is the best.

        None if there was no evaluation, or its value is not a number. Raises ValueError for an
        evaluation without the metric.
        """
        if record.eval_loss is None:
            return None
        values = {EVAL_LOSS: record.eval_loss, **(record.eval_metrics or {})}
        if self._name not in values:
            raise ValueError(
                f"--checkpoint.best {self.text}: the evaluations have no such metric; "
                f"they have {', '.join(values)}"
            )
        value = values[self._name]
        return None if math.isnan(value) else self._sign * value


class EarlyStopping:
    """Ends a run after `patience` evaluations without a better score; never if that is 0.

    `metric` names what the scores are of: it begins anew after a checkpoint with another. The same
    on all ranks, as the scores are. Checkpoints hold its state.
    """

    def __init__(self, patience: int, metric: str = EVAL_LOSS) -> None:
        self._patience, self._metric = patience, metric
        self._best = math.inf
        self._evaluations = 0  # since the best one

    @property
    def enabled(self) -> bool:
        """True if it may end the run."""
        return self._patience > 0

    def after_evaluation(self, score: float | None) -> str | None:
        """Count an evaluation, and return why the run ends, if it does."""
        if score is not None and score < self._best:
            self._best, self._evaluations = score, 0
            return None
        self._evaluations += 1
        if not self.enabled or self._evaluations < self._patience:
            return None
        return f"no better evaluation in the last {self._evaluations}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"best": self._best, "evaluations": self._evaluations, "metric": self._metric}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, unless it is of another metric."""
        if state.get("metric", self._metric) == self._metric:
            self._best, self._evaluations = state["best"], state["evaluations"]


@torch.no_grad()
def check_validation(
    task: tasks.Task,
    model: nn.Module,
    data: JobData,
    name: str,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
) -> None:
    """Compute the loss of one micro-batch of each validation set, as evaluations will. Local.

    The dtypes are those of the batches' floating-point tensors and of autocast. Modules and random
    generators are left as they were. Raises ValueError for a task that fails or returns no Loss,
    with the error and its line; `name` is what --task names the task.
    """
    floats, autocast = dtypes
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
