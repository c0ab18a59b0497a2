"""Training of a task by all ranks of a world: a loop over the services of the world.

A step: load -> forward and backward of each micro-batch (full buckets are sent meanwhile) -> reduce
the gradients and means -> update -> report.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from mntrain import tasks
from mntrain.data.phase_notes import noted
from mntrain.errors import AgreedError, TrainingStoppedError
from mntrain.metrics.files import loss_text
from mntrain.metrics.registry import StepRecord, StepTimer, of_this_rank
from mntrain.options.config import Config
from mntrain.rank_info import memory_now
from mntrain.run.signals import Stop
from mntrain.train import ending
from mntrain.train.description import describe_job
from mntrain.train.evaluation import derived, merge_sets
from mntrain.train.job import Job
from mntrain.train.optimization import advance
from mntrain.train.shared_step import SharedStep, errors_stop
from mntrain.world import World
from zero.optimizer import StepResult


class Trainer:
    """The loop of a job, which begins a run or resumes it.

    Construction is collective and raises AgreedError for bad input: see `Job`.
    """

    def __init__(self, world: World, config: Config, task: tasks.Given | None = None) -> None:
        self._world = world
        self.job = job = Job(world, config, task)
        self._model, self._optimizer = job.model, job.optimizer
        self.batches = job.data.batches(job.done, job.last_step)
        """The micro-batches of this rank in each step."""
        skipped = job.resumed.manifest.skipped_steps if job.resumed else 0
        self._result = ending.JobResult(job.task.flops_per_item(self._model), skipped)
        self._asked: str | None = None  # why this rank's task wants the run to stop
        self._no_better: str | None = None  # why evaluations end the run: the same on all ranks
        self._shared = SharedStep(world, job)

    def fit(self) -> dict[str, Any]:
        """Train to the last step, or until any rank asks to end; return the summary. Collective.

        If the run's directory lacks metrics or the summary, the last line names them. Raises
        TrainingStoppedError, which the summary also has, if a loss or gradient is not finite
        (unless such steps are skipped), replicas differ, or the last checkpoint cannot be written.
        """
        gc.collect()
        gc.freeze()  # a collection would take about 0.2 s for torch's objects
        start, job, result = time.perf_counter(), self.job, self._result
        with job.directory, ExitStack() as at_end, job.display:
            at_end.callback(gc.unfreeze)
            at_end.callback(job.metrics.abandon)
            job.metrics.open()
            self._stop_requested()
            describe_job(self._world, job)
            with closing(self.batches), job.timeline:
                self._train()
            with self._world.recorder.phase("checkpoint"):
                ending.save_at_end(self._world, job, result)
            if result.status == "completed" and self._world.master:
                ending.show_sample(self._world, job)
            result.seconds = time.perf_counter() - start
            result.reason = str(result.error) if result.error else result.reason
            summary = ending.finish_report(self._world, job, result)
        if missing := summary.get("not_written"):
            AgreedError(loss_text(job.directory.path, missing), self._world.rank).report()
        if result.error:
            raise result.error
        return summary

    def _train(self) -> None:
        job, result = self.job, self._result
        for step in count(job.done + 1):
            job.timeline.before_step(step)
            try:
                with errors_stop(self._world, step):
                    record = self._evaluate_if_due(self.train_step(step))
                result.last = record
                job.metrics.write(record.to_json(), own=self._of_this_rank(record))
                job.display.step(record)
                self._asked = job.task.on_step(record) or self._asked
                if stop := self._stop_after(step):
                    result.status, result.reason = stop
                    return
                with errors_stop(self._world, step):
                    job.checkpoints.save_progress(ending.progress_of(job, result))
            except TrainingStoppedError as error:
                result.status, result.error = "failed", error
                job.metrics.write({"step": step, "error": str(error)})
                return

    def train_step(self, step: int) -> StepRecord:
        """Take one step, 1 for the first, and return its record. Collective.

        Between two exchanges (`mntrain.sync`), the ranks of a node take it together. Raises
        TrainingStoppedError or NonFiniteGradientError. Between the update and the next forward,
        only checks and evaluations communicate: all else would wait behind the parameters that are
        being sent.
        """
        job, shared = self.job, self._shared
        timer = StepTimer(self._world.collectives, self._world.recorder, step)
        shared.begin()
        job.balancing.begin()
        with timer("data"):
            micro_batches = next(self.batches)
        self._forward_backward(step, micro_batches, timer)
        job.balancing.end(job.data.sizes[0], timer.times())
        with timer("reduce_wait"):
            shared.before_update(step)
        if not shared.alone:
            job.balancing.after_reduction(step)
        lr = float(self._optimizer.param_groups[0]["lr"])
        with timer("optimizer"), noted(self._world.rank, f"update of step {step}"):
            update = self._optimizer.step()
            if step == job.steps:
                self._optimizer.exchange()
            self._optimizer.zero_grad()
            advance(job.scheduler)
        if shared.meets:
            job.balancing.compare(step)
        return self._complete(step, lr, update, timer.times())

    def _forward_backward(self, step: int, micro_batches: Sequence[Any], timer: StepTimer) -> None:
        """Accumulate gradients and means over micro-batches. Collective.

        At stages 0 and 1, only the last backward sends gradients. It also waits for them.
        """
        rank, optimizer = self._world.rank, self._optimizer
        waited_s = optimizer.accumulation.waited_s
        for number, batch in enumerate(micro_batches):
            samples = partial(self.job.data.name_micro_batch, step, number)
            held = optimizer.no_sync() if number < len(micro_batches) - 1 else nullcontext()
            with timer("forward"), noted(rank, f"forward in step {step} of", samples):
                loss = self._forward(batch)
            with timer("backward"), held, noted(rank, f"backward in step {step} of", samples):
                optimizer.backward(loss.mean, loss.count)
        if not micro_batches:
            self._optimizer.forget_batches()
            self._optimizer.share(0)
        timer.move(optimizer.accumulation.waited_s - waited_s, "backward", "reduce_wait")

    def _forward(self, batch: Any) -> tasks.Loss:
        """Return the task's loss of a micro-batch, and add up its means. Local."""
        job = self.job
        loss = job.precision.loss(job.task, self._model, batch, self._world.device)
        tasks.check_loss(loss, job.config.task)
        self._shared.losses.add_loss(loss)
        return loss

    def _complete(
        self, step: int, lr: float, update: StepResult, times: Mapping[str, Any]
    ) -> StepRecord:
        job, means, items = self.job, self._shared.means, self._shared.items()
        if means.nonfinite:
            self._world.output.warn(f"in step {step}, the loss is {means.nonfinite}")
        if update.skipped:
            norm = update.grad_norm
            self._world.output.warn(f"step {step} was skipped: the gradient's norm is {norm}")
        self._result.add(items, times["step_s"], skipped=update.skipped)
        with noted(self._world.rank, f"metrics of step {step}"):
            metrics = derived(job.task, means)
        return StepRecord(
            step=step,
            loss=means.loss,
            lr=lr,
            grad_norm=None if update.skipped else update.grad_norm,
            clip_coef=None if update.skipped else update.clip_coef,
            clipped_norm=None if update.skipped else update.clipped_norm,
            samples=job.data.sizes[1],
            tokens_per_s=items / times["step_s"],
            metrics=metrics,
            skipped=update.skipped,
            slow_ranks=job.balancing.slow_ranks(step) or None,
            **times,
        )

    def _of_this_rank(self, record: StepRecord) -> dict[str, float]:
        """Return what all ranks are to know of a step of this one. Local."""
        if not self.job.config.log.per_rank:
            return {}
        return of_this_rank(vars(record), memory_now(self._world.device))

    def _evaluate_if_due(self, record: StepRecord) -> StepRecord:
        """Return the record of a step with its evaluation, if there is one. Collective."""
        job = self.job
        if not job.evaluates(record.step):
            return record
        with self._world.recorder.phase("evaluate", record.step), self._optimizer.averaged():
            loss, metrics = self._evaluate()
        record = replace(record, eval_loss=loss, eval_metrics=metrics)
        advance(job.scheduler, loss)
        try:
            score = job.best.score(record)
        except ValueError as error:
            raise TrainingStoppedError(str(error), self._world.rank) from None
        self._no_better = job.best.after_evaluation(score) or self._no_better
        self._asked = job.task.on_evaluation(record) or self._asked
        return record

    def _evaluate(self) -> tuple[float, dict[str, float]]:
        """Return the exact means of the loss and the metrics over all validation sets. Collective.

        Raises TrainingStoppedError if a loss is not finite.
        """
        world, data = self._world, self.job.data
        by_set = {}
        with tasks.evaluating(self._model):
            for name in data.validation_sets:
                for samples, batch in data.validation_batches(name):
                    with noted(world.rank, f"evaluation of {samples}"):
                        self._forward(batch)
                where = f"in evaluation of {name}" if name else "in evaluation"
                found = self._shared.losses.reduce(world.collectives, where)
                if found.nonfinite:
                    reason = f"{where}, the loss is {found.nonfinite}"
                    raise TrainingStoppedError(reason, world.rank)
                with noted(world.rank, f"metrics {where}"):
                    metrics = derived(self.job.task, found)
                by_set[name] = replace(found, metrics=metrics)
        return merge_sets(by_set)

    def _stop_after(self, step: int) -> Stop | None:
        """Return the end of the job, if it is after this step. Collective."""
        if step == self.job.steps:
            return Stop("completed", self._no_better)
        if step == self.job.last_step or self._no_better:
            return Stop("stopped", self._no_better)
        return self._stop_requested()

    def _stop_requested(self) -> Stop | None:
        """Return the request to end that all ranks know of, if any. Collective."""
        run = self.job.config.run
        return self._world.stop_requested(run.max_minutes, grace=run.grace, reason=self._asked)
