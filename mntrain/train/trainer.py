"""Training of a task by all ranks of a world.

A step: load -> forward and backward of each micro-batch (full buckets are sent meanwhile) -> reduce
the gradients and means -> update -> report.
"""

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any, cast

import torch

from mntrain import device, tasks
from mntrain.config import Config
from mntrain.errors import AgreedError, TrainingStoppedError
from mntrain.metrics.registry import METRICS, StepRecord
from mntrain.metrics.step import StepTimer, WeightedSums
from mntrain.train import compiling, run_directory
from mntrain.train.consensus import GlobalMeans, MeanReducer, differing_ranks, model_digest
from mntrain.train.job import TrainingJob
from mntrain.train.precision import PRECISIONS
from mntrain.train.signals import SignalRequests
from mntrain.train.summary import Outcome, RunTotals, describe_job, summarize
from mntrain.world import World, init
from zero.norms import NonFiniteGradientError
from zero.optimizer import StepResult

# Exit codes of jobs that may be resumed: the shell's for Ctrl-C, and EX_TEMPFAIL of sysexits.h.
EXIT_CODES = {"interrupted": 130, "preempted": 75}


def run(config: Config) -> int:
    """Train as configured on all ranks of the job, and return the exit code. Collective.

    An error that all ranks agree on is printed once, by the master: the code is 2 for bad input,
    and 1 for training that had to stop. An exception on one rank alone ends the job with a
    traceback.
    """
    try:
        with init(
            device=config.device,
            algorithm=config.comm.algorithm,
            bucket_mb=config.comm.bucket_mb,
            ranks_per_node=config.comm.ranks_per_node,
            tune=config.comm.tune,
            wire_dtype=config.comm.wire_dtype,
            gather_dtype=config.comm.gather_dtype,
            transport=config.comm.transport,
        ) as world:
            return Trainer(world, config).fit()
    except AgreedError as error:
        error.report()
        return 1 if isinstance(error, TrainingStoppedError) else 2


class Trainer:
    """One training job, which begins a run or resumes it.

    Construction is collective and raises AgreedError for bad input: see `TrainingJob`.
    """

    def __init__(self, world: World, config: Config) -> None:
        self._world, self._config = world, config
        self._job = job = TrainingJob(world, config)
        self._model, self._optimizer = job.model, job.optimizer
        self._checkpointing, self._reporter = job.checkpointing, job.reporter
        self._precision = PRECISIONS[config.train.precision]
        self._signals = SignalRequests()
        self._means = MeanReducer(world)
        skipped_steps = job.resumed.manifest.skipped_steps if job.resumed else 0
        self._totals = RunTotals(job.task.flops_per_item(job.model), skipped_steps)
        self._longest_step_s = 0.0

    def fit(self) -> int:
        """Train to the last step, or until any rank asks to end; return the exit code. Collective.

        The code is 0 for a run that completed or stopped as asked for, else one of `EXIT_CODES`.
        Raises TrainingStoppedError, which the summary also has, if a loss or gradient is not finite
        (unless such steps are skipped), replicas differ, or the last checkpoint cannot be written.
        """
        start = time.perf_counter()
        with (
            _closed_after(self._job.lock),
            self._reporter as reporter,
            self._signals as signals,
            _frozen_garbage(),
        ):
            reporter.start(describe_job(self._world, self._config, self._model))
            if self._job.resumed:
                run_directory.report_resumption(self._job.resumed, reporter)
            outcome = self._train()
            with signals.deferred():
                outcome = self._save_at_end(outcome)
            if outcome.status == "completed" and self._world.master:
                with compiling.eager():
                    reporter.text("sample", self._job.task.sample(self._model) or "")
            self._totals.seconds = time.perf_counter() - start
            reporter.finish(self._summary(replace(outcome, reason=self._reason(outcome.status))))
        if outcome.error:
            raise outcome.error
        return EXIT_CODES.get(outcome.status, 0)

    def _train(self) -> Outcome:
        """Take steps until the job is to end. Collective."""
        record = None
        for step in count(self._job.done + 1):
            start = time.perf_counter()
            try:
                record, flags = self.train_step(step)
            except TrainingStoppedError as error:
                return Outcome("failed", record, error)
            self._reporter.step(record)
            status = self._status(step, flags)
            if status != "running":
                return Outcome(status, record)
            self._checkpointing.after_step(record, self._totals.skipped_steps, flags)
            self._longest_step_s = max(self._longest_step_s, time.perf_counter() - start)
        raise AssertionError("the loop ends at the last step")

    def train_step(self, step: int) -> tuple[StepRecord, Mapping[str, float]]:
        """Take one step, 1 for the first; return its record and the summed flags. Collective.

        Raises TrainingStoppedError. Between the update and the next forward nothing is collective
        but due checks and evaluations: it would queue behind the parameters that are being sent.
        """
        timer = StepTimer(self._world.collectives)
        with timer("data"):
            micro_batches = next(self._job.batches)
        sums = self._forward_backward(micro_batches, timer)
        with timer("reduce_wait"):
            self._optimizer.synchronize()
            means = self._reduce_means(step, sums)
        lr = float(self._job.scheduler.get_last_lr()[0])
        with timer("optimizer"):
            update = self._update(step)
        record = self._record(step, lr, means, update, timer)
        return self._check_and_evaluate(record), means.values

    def _forward_backward(self, micro_batches: Sequence[Any], timer: StepTimer) -> WeightedSums:
        """Accumulate gradients over micro-batches; return the sums of their means. Local.

        Only the last backward sends gradients.
        """
        sums = WeightedSums()
        for left, batch in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
            with timer("forward"):
                loss = self._loss(batch)
            with timer("backward"), self._optimizer.no_sync() if left else nullcontext():
                self._optimizer.backward(loss.mean, weight=loss.count)
            sums.add(loss.count, {"loss": loss.mean, **loss.metrics})
        if not micro_batches:
            self._optimizer.share(0)
        return sums

    def _loss(self, batch: Any) -> tasks.Loss:
        """Return the task's loss of a micro-batch, after moving it to the device. Local."""
        moved = device.move(batch, self._world.device, self._precision.parameters)
        with self._precision.autocast_context(self._world.device):
            return self._job.task.loss(self._model, moved)

    def _reduce_means(self, step: int, sums: WeightedSums) -> GlobalMeans:
        """Return the step's means over the ranks that the sync schedule names. Collective.

        Raises TrainingStoppedError if the loss is not finite, unless such steps are skipped.
        """
        means = self._means(sums, self._optimizer.group, f"in step {step}", self._local_values())
        skips = self._config.optim.non_finite == "skip" or self._precision.loss_scale == "dynamic"
        if means.nonfinite and not skips:
            raise self._stopped(f"in step {step}, the loss is {means.nonfinite}")
        return means

    def _local_values(self) -> dict[str, float]:
        """Return this rank's flags and metrics that are reduced over ranks in every step. Local."""
        near = self._job.deadline.near(self._longest_step_s, self._checkpointing.longest_s)
        return {
            "interrupted": float(self._signals.interrupted),
            "preempted": float(self._signals.preempted or near),
            **self._checkpointing.local_flags(),
        }

    def _update(self, step: int) -> StepResult:
        """Update the parameters and the learning rate, and clear the gradients. Collective."""
        try:
            update = self._optimizer.step()
        except NonFiniteGradientError as error:
            raise self._stopped(f"in step {step}, {error}") from None
        self._optimizer.zero_grad()
        self._job.scheduler.step()
        return update

    def _record(
        self, step: int, lr: float, means: GlobalMeans, update: StepResult, timer: StepTimer
    ) -> StepRecord:
        """Count the step, warn if it was not finite, and return its record. Local."""
        if warning := _nonfinite_warning(means, update):
            self._reporter.warn(f"in step {step}, {warning}")
        seconds = timer.elapsed()
        self._totals.add(means.count, seconds, skipped=update.skipped)
        reduced: dict[str, Any] = {n: value for n, value in means.values.items() if n in METRICS}
        return StepRecord(
            step=step,
            loss=means.loss,
            lr=lr,
            grad_norm=None if update.skipped else update.grad_norm,
            clip_coef=None if update.skipped else update.clip_coef,
            clipped_norm=None if update.skipped else update.clipped_norm,
            samples=self._job.data.batch_size(step),
            tokens_per_s=means.count / seconds,
            step_s=seconds,
            communication=timer.communication(),
            exposed=timer.exposed(),
            metrics=means.metrics,
            skipped=update.skipped,
            **cast(dict[str, Any], timer.phases),
            **reduced,
        )

    def _check_and_evaluate(self, record: StepRecord) -> StepRecord:
        """Compare the replicas and evaluate, if due after this step. Collective."""
        train = self._config.train
        if _due(train.check_every, record.step):
            self._check_replicas(record.step)
        if record.step != train.steps and not _due(train.eval_every, record.step):
            return record
        means = self.evaluate()
        return replace(record, eval_loss=means.loss, eval_metrics=means.metrics)

    @torch.no_grad()
    def evaluate(self) -> GlobalMeans:
        """Return exact means of loss and metrics over the validation samples. Collective.

        Raises TrainingStoppedError if the loss is not finite.
        """
        self._model.eval()
        sums = WeightedSums()
        for batch in self._job.data.validation_batches():
            loss = self._loss(batch)
            sums.add(loss.count, {"loss": loss.mean, **loss.metrics})
        self._model.train()
        means = self._means(sums, self._world.collectives, "in evaluation")
        if means.nonfinite:
            raise self._stopped(f"in evaluation, the loss is {means.nonfinite}")
        return means

    def _check_replicas(self, step: int) -> None:
        """Raise TrainingStoppedError if ranks hold different weights. Collective."""
        self._optimizer.wait_for_parameters()
        if ranks := differing_ranks(self._world.gather(model_digest(self._model))):
            raise self._stopped(
                f"after step {step}, the weights differ between ranks: "
                f"rank {', '.join(map(str, ranks))} against the others"
            )

    def _status(self, step: int, flags: Mapping[str, float]) -> str:
        """Return the status of the job after a step, "running" if it goes on."""
        if step == self._config.train.steps:
            return "completed"
        if step == self._job.last_step:
            return "stopped"
        if flags["preempted"]:
            return "preempted"
        return "interrupted" if flags["interrupted"] else "running"

    def _save_at_end(self, outcome: Outcome) -> Outcome:
        """Save at the end of the job, if wanted or preempted; return the outcome. Collective."""
        last = outcome.last
        saves = self._checkpointing.wanted or outcome.status == "preempted"
        if last is None or outcome.error or not saves:
            self._checkpointing.wait(last.step if last else self._job.done)
            return outcome
        try:
            self._checkpointing.save_now(last, self._totals.skipped_steps)
        except AgreedError as error:
            if outcome.status != "interrupted":
                return Outcome("failed", last, self._stopped(str(error)))
            self._reporter.warn(str(error))
        return outcome

    def _reason(self, status: str) -> str | None:
        """Return the signal and rank, or the deadline, that ended the job early. Collective."""
        if status not in EXIT_CODES:
            return None
        signals = self._world.gather(self._signals.first.name if self._signals.first else None)
        for rank, name in enumerate(signals):
            if name:
                return f"{name} on rank {rank}"
        return self._job.deadline.reason

    def _summary(self, outcome: Outcome) -> dict[str, Any]:
        """Return the content of summary.json. Collective."""
        summary = summarize(
            self._world,
            self._optimizer,
            self._config,
            self._job.run_dir,
            outcome=outcome,
            totals=self._totals,
        )
        resumed = self._job.resumed
        summary["resumed_from"] = str(resumed.path) if resumed else None
        summary |= self._checkpointing.summary()
        return summary | ({"error": str(outcome.error)} if outcome.error else {})

    def _stopped(self, reason: str) -> TrainingStoppedError:
        return TrainingStoppedError(reason, self._world.rank)


def _nonfinite_warning(means: GlobalMeans, update: StepResult) -> str:
    """Return a warning about a loss or gradient that is not finite, or ""."""
    if update.skipped:
        loss = f" and the loss is {means.nonfinite}" if means.nonfinite else ""
        return f"the gradient's norm is {update.grad_norm}{loss}: the step was skipped"
    return (
        f"the loss is {means.nonfinite}, though the gradient is finite" if means.nonfinite else ""
    )


@contextmanager
def _closed_after(lock: int | None) -> Iterator[None]:
    """Close a descriptor after the block, also after an exception: another job may follow."""
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which takes about 0.2 s for torch's."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
