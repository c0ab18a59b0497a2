"""Evaluations of a job: on which metric they are judged, and when they end the run."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from mntrain.metrics.registry import StepRecord
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
