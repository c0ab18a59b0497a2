"""Evaluations of a job: their trial at the start, their metric, and when they end the run."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from mntrain.checkpoint import random_states, set_random_states
from mntrain.metrics.registry import StepRecord
from mntrain.run.means import to_float
from mntrain.tasks import Task, check_loss, errors_of_task, evaluating, name_of
from mntrain.train.forward import Precision
from mntrain.train.job_data import JobData
from mntrain.train.step_means import GlobalMeans, StepMeans
from zero.collectives import SingleProcessCollectives

EVAL_LOSS = "eval_loss"


def derived(task: Task, means: GlobalMeans) -> dict[str, float]:
    """Return the metrics that a task derives from the means over all ranks, as floats. Local.

    Raises TypeError for what is no number: files and reports would have it as a text.
    """
    given = task.derive(means.loss, means.metrics)
    if not isinstance(given, Mapping):
        raise TypeError(f"derive() returned a {type(given).__name__}: return a dict of numbers")
    numbers = {name: to_float(value) for name, value in given.items()}
    for name, number in numbers.items():
        if number is None:
            raise TypeError(f"derive() returned {given[name]!r} as {name}: return a number")
    return {name: number for name, number in numbers.items() if number is not None}


def merge_sets(by_set: Mapping[str, GlobalMeans]) -> tuple[float, dict[str, float]]:
    """Return the loss over the items of all validation sets, and the metrics of each by its name.

    The metrics of an only set without a name keep their names.
    """
    if set(by_set) == {""}:
        return by_set[""].loss, by_set[""].metrics
    metrics: dict[str, float] = {}
    for name, means in by_set.items():
        named = {"loss": means.loss, **means.metrics}
        metrics |= {f"{name} {metric}": value for metric, value in named.items()}
    total = sum(means.loss * means.count for means in by_set.values())
    return total / sum(means.count for means in by_set.values()), metrics


class BestMetric:
    """The metric of an evaluation that says which one is best, and when a run ends for it.

    `text` is --checkpoint.best: "eval_loss", or the name of a metric of the task, such as
    "accuracy:max". A run ends after `patience` evaluations without a better score; never if that is
    0. The same on all ranks, as the metrics are. Checkpoints hold its state: it begins anew after
    one with another metric.
    """

    def __init__(self, text: str = EVAL_LOSS, patience: int = 0) -> None:
        self.text, self.patience = text, patience
        self._name, _, mode = text.partition(":")
        self._sign = -1.0 if mode == "max" else 1.0
        self._best = math.inf
        self._evaluations = 0  # since the best one

    def score(self, record: StepRecord) -> float | None:
        """Return the score of a step's evaluation, of which the lowest is the best.

        None if there was no evaluation, or its value is not a number. Raises ValueError for an
        evaluation without the metric.
        """
        if record.eval_loss is None:
            return None
        values = {EVAL_LOSS: record.eval_loss, **(record.eval_metrics or {})}
        values[EVAL_LOSS] = record.eval_loss  # also if a metric has that name
        self.check(values)
        value = values[self._name]
        return None if math.isnan(value) else self._sign * value

    def check(self, names: Iterable[str]) -> None:
        """Raise ValueError unless the metric is among those of evaluations."""
        if self._name not in names:
            raise ValueError(
                f"--checkpoint.best {self.text}: the evaluations have no such metric; "
                f"they have {', '.join(names)}"
            )

    def check_without_data(self) -> None:
        """Raise ValueError for options that count evaluations, of which there will be none."""
        given = [f"--train.patience {self.patience}"] if self.patience else []
        given += [f"--checkpoint.best {self.text}"] if self.text != EVAL_LOSS else []
        if given:
            raise ValueError(
                f"{' and '.join(given)}: there is no validation data, so no evaluation: give some, "
                "or leave this out"
            )

    def after_evaluation(self, score: float | None) -> str | None:
        """Count an evaluation, and return why the run ends, if it does."""
        if score is not None and score < self._best:
            self._best, self._evaluations = score, 0
            return None
        self._evaluations += 1
        if not self.patience or self._evaluations < self.patience:
            return None
        return f"no better evaluation in the last {self._evaluations}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"best": self._best, "evaluations": self._evaluations, "metric": self.text}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, unless it is of another metric."""
        if state["metric"] == self.text:
            self._best, self._evaluations = state["best"], state["evaluations"]


def try_evaluation(
    task: Task, model: nn.Module, data: JobData, precision: Precision, best: BestMetric
) -> None:
    """Compute the loss of one micro-batch of each validation set, as evaluations will. Local.

    Modules and random generators are left as they were. Raises ValueError for a task that fails or
    returns no Loss, with the error and its line, if no evaluation will have the metric `best`, and
    if there is no validation data for the options of `best`.
    What `derive` lacks in a single batch, such as a number above 0 to divide by, is no failure.
    """
    if not data.validation_sets:
        best.check_without_data()
    on = next((p.device for p in model.parameters()), torch.device("cpu"))
    task = copy.copy(task)  # one that counts its calls, say, must not count this one
    states = random_states(on)
    sums = {which: StepMeans(0) for which in data.validation_sets}
    try:
        with evaluating(model):
            for which, means in sums.items():
                label = f"the validation data {which}".strip()
                with errors_of_task(task, f"an evaluation of {label} fails"):
                    samples = data.first_validation_samples(which)
                    batch = (task.collate or default_collate)(samples)
                    loss = precision.loss(task, model, batch, on)
                    check_loss(loss, name_of(task))
                    means.add_loss(loss)
    finally:
        set_random_states(states, on)
    by_set: dict[str, GlobalMeans] = {}
    with errors_of_task(task, "derive() fails in an evaluation"):
        try:
            for which, means in sums.items():
                found = means.reduce(SingleProcessCollectives(), "in an evaluation")
                by_set[which] = replace(found, metrics=derived(task, found))
        except (ArithmeticError, LookupError, ValueError):
            return  # of a batch without a positive, say: the first evaluation checks it
        names = [EVAL_LOSS, *merge_sets(by_set)[1]] if by_set else []
    if names:
        best.check(names)
