"""Steps as one rank knows them, and their records, which have the means over all ranks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mntrain.data.phase_notes import noted
from mntrain.metrics.registry import METRICS, StepRecord
from mntrain.train.consensus import GlobalMeans
from mntrain.train.job import TrainingJob
from mntrain.train.summary import JobResult
from zero.optimizer import StepResult

SKIPPING_RANKS = "skipping_ranks"  # the number of ranks that skipped a step, if they may differ


class TakenStep(NamedTuple):
    """A step as this rank knows it alone."""

    step: int
    lr: float
    samples: int  # of all ranks
    update: StepResult
    times: Mapping[str, Any]  # by field of `StepRecord`


KnownStep = tuple[TakenStep, GlobalMeans]


def complete_step(
    job: TrainingJob, result: JobResult, rank: int, taken: TakenStep, means: GlobalMeans
) -> StepRecord:
    """Count a step, warn if it was not finite, and return its record. Local."""
    step, update = taken.step, taken.update
    skipped = update.skipped or bool(means.values.get(SKIPPING_RANKS))
    if means.nonfinite:
        job.reporter.warn(f"in step {step}, the loss is {means.nonfinite}")
    if update.skipped:
        job.reporter.warn(f"step {step} was skipped: the gradient's norm is {update.grad_norm}")
    elif skipped:
        job.reporter.warn(f"step {step} was skipped on another node")
    seconds = taken.times["step_s"]
    result.add(means.count, seconds, skipped=skipped)
    reduced: dict[str, Any] = {n: value for n, value in means.values.items() if n in METRICS}
    with noted(rank, f"metrics of step {step}"):
        metrics = job.task.derive(means.loss, means.metrics)
    return StepRecord(
        step=step,
        loss=means.loss,
        lr=taken.lr,
        grad_norm=None if update.skipped else update.grad_norm,
        clip_coef=None if update.skipped else update.clip_coef,
        clipped_norm=None if update.skipped else update.clipped_norm,
        samples=taken.samples,
        tokens_per_s=means.count / seconds,
        metrics=metrics,
        skipped=skipped,
        slow_ranks=job.balancing.slow_ranks(step) or None,
        **taken.times,
        **reduced,
    )
