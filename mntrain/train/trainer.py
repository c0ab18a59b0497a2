"""Training of a task by all ranks of a world.

A step: load -> forward and backward of each micro-batch (full buckets are sent meanwhile) -> reduce
the gradients and means -> update -> report.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from mntrain import tasks
from mntrain.checkpoint import Manifest
from mntrain.comm.world_collectives import WorldCollectives
from mntrain.config import Config
from mntrain.data.phase_notes import noted
from mntrain.errors import AgreedError, TrainingStoppedError
from mntrain.metrics.files import loss_text
from mntrain.metrics.registry import StepRecord, StepTimer, of_this_rank
from mntrain.rank_info import memory_now
from mntrain.run.signals import StopRequests
from mntrain.train.evaluation import evaluate
from mntrain.train.job import TrainingJob
from mntrain.train.resumption import to_json
from mntrain.train.step_agreement import StepAgreement, errors_stop
from mntrain.train.step_means import PartCounts, StepMeans
from mntrain.train.summary import JobResult, describe_job, finish_report, show_sample
from mntrain.world import World
from zero.optimizer import StepResult


class Trainer:
    """One training job, which begins a run or resumes it.

    Construction is collective and raises AgreedError for bad input: see `TrainingJob`.
    """

    def __init__(self, world: World, config: Config, task: tasks.Given | None = None) -> None:
        self._world = world
        self.job = job = TrainingJob(world, config, task)
        self._config = config = job.config
        self._model, self._optimizer = job.model, job.optimizer
        self._reporter = job.reporter
        self._requests = StopRequests(
            world,
            job.deadline,
            longest_save_s=lambda: job.checkpoints.longest_s,
            grace_s=config.run.grace,
            option="--run.grace",
        )
        self._early_end = job.directory.write_early_end
        world.watchdog.at_end += [self._early_end, lambda *_: job.reporter.end_display()]
        self._means = StepMeans(world.rank)
        self._counts = PartCounts(job.task, config.task, self._step_group, world.waits)
        skipped_steps = job.resumed.manifest.skipped_steps if job.resumed else 0
        self._result = JobResult(job.task.flops_per_item(job.model), skipped_steps)
        self._saved_config = to_json(config)
        self._asked_to_stop: str | None = None  # why, by this rank's task
        self._agreement = StepAgreement(
            world,
            job,
            self._means,
            self._counts,
            own_flags=self._own_flags,
            save=self._save_before_error,
        )

    def fit(self) -> dict[str, Any]:
        """Train to the last step, or until any rank asks to end; return the summary. Collective.

        If the run's directory lacks metrics or the summary, the last line names them. Raises
        TrainingStoppedError, which the summary also has, if a loss or gradient is not finite
        (unless such steps are skipped), replicas differ, or the last checkpoint cannot be written.
        """
        gc.collect()
        gc.freeze()  # a collection would take about 0.2 s for torch's objects
        try:
            return self._fit()
        finally:
            gc.unfreeze()

    def _fit(self) -> dict[str, Any]:
        start = time.perf_counter()
        result = self._result
        with self.job.directory, self._reporter, self._requests:
            describe_job(self._world, self.job)
            with closing(self.job.batches), self.job.timeline:
                self._train()
            with self._requests.deferred(), self._world.recorder.phase("checkpoint"):
                self._save_at_end()
            if result.status == "completed" and self._world.master:
                show_sample(self.job)
            result.seconds = time.perf_counter() - start
            if result.status in ("interrupted", "preempted"):
                result.reason = self._requests.find_reason()
            elif result.error:
                result.reason = str(result.error)
            summary = finish_report(self._world, self.job, result)
            self._world.watchdog.at_end.remove(self._early_end)
        if missing := summary.get("not_written"):
            AgreedError(loss_text(self.job.run_dir, missing), self._world.rank).report()
        if result.error:
            raise result.error
        return summary

    def _train(self) -> None:
        result = self._result
        for step in count(self.job.done + 1):
            self.job.timeline.before_step(step)
            self._requests.begin_step()
            try:
                with errors_stop(self._world, step):
                    record = self._evaluate_if_due(self.train_step(step))
                result.last = record
                self._reporter.step(record)
                self._asked_to_stop = self.job.task.on_step(record) or self._asked_to_stop
                result.status = self._status(step)
                if result.status != "running":
                    self._requests.end()
                    return
                saving = self._world.recorder.phase("checkpoint", step)
                with saving, errors_stop(self._world, step):
                    self.job.checkpoints.save_if_due(self._progress(record), self._agreement.flags)
            except TrainingStoppedError as error:
                result.status, result.error = "failed", error
                self._reporter.failed_step(step, str(error))
                return
            self._requests.end_step()

    def _progress(self, record: StepRecord) -> Manifest:
        """Return what a checkpoint after a step records of the run. Local."""
        job = self.job
        return Manifest(
            step=record.step,
            config=self._saved_config,
            samples=job.data.samples,
            skipped_steps=self._result.skipped_steps,
            eval_loss=record.eval_loss,
            data=job.data_facts,
            scored_by=job.best.text,
            position=job.data.position(record.step),
            score=job.best.score(record),
        )

    def _save_last(self, *, wanted: bool) -> AgreedError | None:
        """Save the last completed step, if wanted and it is not saved; return why that failed."""
        last, checkpoints = self._result.last, self.job.checkpoints
        checkpoints.wait()
        if last is None or not wanted:
            return None
        try:
            with errors_stop(self._world, last.step):
                checkpoints.save_now(self._progress(last))
        except AgreedError as error:
            return error
        return None

    def _save_at_end(self) -> None:
        """Save if wanted or preempted; a failure is the job's result. Collective."""
        result = self._result
        saves = self.job.saves or result.status == "preempted"
        error = self._save_last(wanted=saves and not result.error)
        if error and result.status != "interrupted":
            result.status = "failed"
            result.error = TrainingStoppedError(str(error), self._world.rank)
        elif error:
            self._reporter.warn(str(error))

    def _save_before_error(self) -> None:
        if error := self._save_last(wanted=self.job.saves):
            self._reporter.warn(str(error))

    def train_step(self, step: int) -> StepRecord:
        """Take one step, 1 for the first, and return its record. Collective.

        Of the node, between two exchanges (`mntrain.sync`). Raises
        TrainingStoppedError or NonFiniteGradientError; an exception before the update is raised
        when the run is saved as it was before the step. Between the update and the next forward,
        only checks and evaluations communicate: all else would wait behind the parameters that are
        being sent.
        """
        timer = StepTimer(self._world.collectives, self._world.recorder, step)
        own_samples = partial(self.job.data.own_samples, step)
        measured = self.job.balancing.computing(own_samples, timer.times)
        with self._agreement.computing(step), measured:
            with timer("data"):
                micro_batches = next(self.job.batches)
            self._forward_backward(step, micro_batches, timer)
        with timer("reduce_wait"):
            self._counts.end_step()
            self._optimizer.synchronize()
            self._agreement.before_update(step)
        self._agreement.end_if_failed(step)
        lr = self.job.schedule.lr
        with timer("optimizer"), noted(self._world.rank, f"update of step {step}"):
            update = self._optimizer.step()
            if step == self.job.steps:
                self._optimizer.exchange()
            self._optimizer.zero_grad()
            self.job.schedule.after_step()
        self._agreement.after_update(step)
        if self._all_meet(step):
            self._agreement.meet()
        return self._complete(step, lr, update, timer.times())

    def _complete(
        self, step: int, lr: float, update: StepResult, times: Mapping[str, Any]
    ) -> StepRecord:
        job, means, items = self.job, self._agreement.means, self._agreement.items(step)
        if means.nonfinite:
            self._reporter.warn(f"in step {step}, the loss is {means.nonfinite}")
        if update.skipped:
            norm = update.grad_norm
            self._reporter.warn(f"step {step} was skipped: the gradient's norm is {norm}")
        self._result.add(items, times["step_s"], skipped=update.skipped)
        if self._config.log.per_rank:
            self._agreement.measured = of_this_rank(times, memory_now(self._world.device))
        with noted(self._world.rank, f"metrics of step {step}"):
            metrics = job.task.derive(means.loss, means.metrics)
        return StepRecord(
            step=step,
            loss=means.loss,
            lr=lr,
            grad_norm=None if update.skipped else update.grad_norm,
            clip_coef=None if update.skipped else update.clip_coef,
            clipped_norm=None if update.skipped else update.clipped_norm,
            samples=job.data.batch_size(step),
            tokens_per_s=items / times["step_s"],
            metrics=metrics,
            skipped=update.skipped,
            round_loss=self._agreement.round_loss,
            slow_ranks=job.balancing.slow_ranks(step) or None,
            **self._agreement.by_rank,
            **times,
        )

    def _forward_backward(self, step: int, micro_batches: Sequence[Any], timer: StepTimer) -> None:
        """Accumulate gradients and means over micro-batches. Collective.

        At stages 0 and 1, only the last backward sends gradients. It also waits for them.
        """
        rank, optimizer = self._world.rank, self._optimizer
        with noted(rank, f"counts of step {step}"):
            self._counts.start(micro_batches)
        waited_s = optimizer.accumulation.waited_s
        for number, batch in enumerate(micro_batches):
            samples = partial(self.job.data.name_micro_batch, step, number)
            held = optimizer.no_sync() if number < len(micro_batches) - 1 else nullcontext()
            with timer("forward"), noted(rank, f"forward in step {step} of", samples):
                loss = self._forward(batch)
            with timer("backward"), held, noted(rank, f"backward in step {step} of", samples):
                optimizer.backward(*self._counts.weigh(loss, timer))
        if not micro_batches:
            self._optimizer.forget_batches()
            self._optimizer.share(0)
        timer.move(optimizer.accumulation.waited_s - waited_s, "backward", "reduce_wait")

    def _forward(self, batch: Any) -> tasks.Loss | tasks.Losses:
        """Return the task's loss of a micro-batch, and add up its means. Local."""
        task, precision = self.job.task, self.job.precision
        loss = self._counts.checked(precision.loss(task, self._model, batch, self._world.device))
        self._means.add_loss(loss)
        return loss

    def _own_flags(self) -> dict[str, float]:
        """Return what this rank asks for; sums over all ranks count after the step. Local."""
        return {
            **self._requests.local_flags(self._agreement.delay),
            "asked_to_stop": float(self._asked_to_stop is not None),
            **self.job.checkpoints.local_flags(),
        }

    def _all_meet(self, step: int) -> bool:
        """Return whether all ranks need each other after a step, alike on all of them."""
        flags = self._agreement.flags
        return (
            step == self.job.last_step
            or self._evaluates(step)
            or self.job.timeline.meets_after(step)
            or any(flags[name] for name in ("interrupted", "preempted", "asked_to_stop"))
            or self.job.checkpoints.acts(step, flags)
        )

    def _evaluates(self, step: int) -> bool:
        every = self._config.train.eval_every
        due = step == self.job.steps or (every > 0 and step % every == 0)
        return due and bool(self.job.data.validation_sets)

    def _evaluate_if_due(self, record: StepRecord) -> StepRecord:
        if not self._evaluates(record.step):
            return record
        with self._world.recorder.phase("evaluate", record.step), self._optimizer.averaged():
            loss, metrics = self.evaluate()
        record = replace(record, eval_loss=loss, eval_metrics=metrics)
        self._result.evaluated = record
        self.job.schedule.after_evaluation(loss)
        try:
            score = self.job.best.score(record)
        except ValueError as error:
            raise TrainingStoppedError(str(error), self._world.rank) from None
        self._result.reason = self.job.best.after_evaluation(score)
        self._asked_to_stop = self.job.task.on_evaluation(record) or self._asked_to_stop
        return record

    def evaluate(self) -> tuple[float, dict[str, float]]:
        """Return the exact means of the loss and the metrics over all validation sets. Collective.

        Raises TrainingStoppedError if a loss is not finite.
        """
        task, data = self.job.task, self.job.data
        with tasks.evaluating(self._model):
            return evaluate(self._world, task, data, self._means, self._forward)

    def _step_group(self) -> WorldCollectives:
        """Return the ranks that the current step is averaged over, for more than gradients."""
        whole = self._optimizer.group.size == self._world.size
        return self._world.collectives if whole else self._world.node_collectives

    def _status(self, step: int) -> str:
        flags = self._agreement.flags
        if step == self.job.steps:
            return "completed"
        if step == self.job.last_step:
            return "stopped"
        if flags["asked_to_stop"]:
            reasons = self._world.gather(self._asked_to_stop)
            self._result.reason = next(filter(None, reasons))
        if self._result.reason:
            return "stopped"
        self._requests.agree(flags)
        return self._requests.status
