"""The records of steps, which have the means over all ranks."""

from collections.abc import Mapping
from typing import Any

from mntrain.data.phase_notes import noted
from mntrain.metrics.registry import StepRecord
from mntrain.train.job import TrainingJob
from mntrain.train.step_means import GlobalMeans
from mntrain.train.summary import JobResult
from zero.optimizer import StepResult


def complete_step(
    job: TrainingJob,
    result: JobResult,
    rank: int,
    *,
    step: int,
    lr: float,
    update: StepResult,
    times: Mapping[str, Any],
    means: GlobalMeans,
    items: int,
) -> StepRecord:
    """Count a step, warn if it was not finite, and return its record. Local.

    `times` are by field of `StepRecord`; `items` are those of all ranks.
    """
    if means.nonfinite:
        job.reporter.warn(f"in step {step}, the loss is {means.nonfinite}")
    if update.skipped:
        job.reporter.warn(f"step {step} was skipped: the gradient's norm is {update.grad_norm}")
    seconds = times["step_s"]
    result.add(items, seconds, skipped=update.skipped)
    with noted(rank, f"metrics of step {step}"):
        metrics = job.task.derive(means.loss, means.metrics)
    return StepRecord(
        step=step,
        loss=means.loss,
        lr=lr,
        grad_norm=None if update.skipped else update.grad_norm,
        clip_coef=None if update.skipped else update.clip_coef,
        clipped_norm=None if update.skipped else update.clipped_norm,
        samples=job.data.batch_size(step),
        tokens_per_s=items / seconds,
        metrics=metrics,
        skipped=update.skipped,
        slow_ranks=job.balancing.slow_ranks(step) or None,
        **times,
    )
