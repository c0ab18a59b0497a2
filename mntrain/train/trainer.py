"""The training job: a task, trained by all ranks of a world, reported by the master.

data -> forward -> backward (buckets leave) -> wait for the sums -> update -> report
"""

import gc
import os
import time
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LambdaLR

from mntrain import checkpoint, device, tasks
from mntrain.config import Config
from mntrain.data import sampling
from mntrain.errors import AgreedError, TrainingStoppedError
from mntrain.metrics.flops import Throughput
from mntrain.metrics.report import Reporter, make_reporter
from mntrain.metrics.step import PhaseTimer, StepRecord, WeightedSums
from mntrain.train import compiling, replica_check, run_directory, schedule, summary
from mntrain.train.checkpointing import Checkpointing
from mntrain.train.deadline import Deadline
from mntrain.train.means import GlobalMeans, MeanReducer
from mntrain.train.precision import PRECISIONS
from mntrain.train.signals import SignalRequests
from mntrain.world import World, init
from zero.optimizer import NonFiniteGradientError, StepResult, ZeroOptimizer

# Exit codes of what may go on later: as a shell says of a command that Ctrl-C ended, and
# EX_TEMPFAIL of sysexits.h, which asks to try again.
ENDS = {"interrupted": 130, "preempted": 75}


def run(config: Config) -> int:
    """Train as the configuration says, on all ranks of the job. Collective; gives the exit code.

    What all ranks agree is wrong is printed once, by the master: 2 is returned for what was given,
    1 for training that had to stop. An exception of one rank alone ends the job with a traceback.
    """
    try:
        with init(
            device=config.device,
            algorithm=config.comm.algorithm,
            bucket_mb=config.comm.bucket_mb,
            ranks_per_node=config.comm.ranks_per_node,
            tune=config.comm.tune,
            wire_dtype=config.comm.wire_dtype,
            transport=config.comm.transport,
        ) as world:
            return Trainer(world, config).fit()
    except AgreedError as error:
        error.report()
        return 1 if isinstance(error, TrainingStoppedError) else 2


class Trainer:
    """One training run.

    Construction is collective, and does everything that can refuse before any work starts: it
    raises AgreedError on all ranks alike. The run directory is made last.
    """

    def __init__(self, world: World, config: Config) -> None:
        self._world, self._config = world, config
        self._precision = PRECISIONS[config.train.precision]
        # The master's, who tells the others: a node's clock may be wrong.
        self._deadline = Deadline.of(config.run.max_minutes, os.environ if world.master else {})
        self._longest_step_s = 0.0
        self._run_dir = run_directory.directory(world, config)
        self._found = found = run_directory.to_resume(world, config, self._run_dir)
        self._done = done = found.manifest.step if found else 0
        stop_after = config.run.stop_after or config.train.steps
        self._stop = min(config.train.steps, done + stop_after)
        with world.agreement():
            self._task = tasks.load(config.task, config)
            train, valid = self._task.dataset("train"), self._task.dataset("valid")
            self._valid = sampling.spread(valid, config.train.eval_samples)
            samples = len(cast(Sized, train))
            self._plan = sampling.SamplingPlan(samples, config.train.batch_size, config.run.seed)
            torch.manual_seed(config.run.seed)
            self._model = self._task.model().to(world.device, self._precision.parameters)
            optimizer_class, options = schedule.find(config.optim, world.device)
            if config.train.compile:
                compiling.check(world.device)
        self._check_same_data([samples, len(cast(Sized, valid))])
        if found:
            run_directory.expect_same(world, found, config, samples)
        self._optimizer = self._make_optimizer(optimizer_class, options)
        saver = checkpoint.Saver(
            world, self._model, self._optimizer, self._run_dir, config.checkpoint.keep
        )
        self._saves = Checkpointing(world, config, saver, samples, found)
        with world.agreement():
            if self._saves.wanted:
                saver.check()
        if found:
            checkpoint.load(found, self._model, self._optimizer, world)
        self._scheduler = self._make_scheduler()
        if config.train.compile:
            compiling.compile_regions(self._task.regions(self._model))
        self._flops = self._task.flops_per_item(self._model)
        self._pace = Throughput()
        torch.manual_seed(sampling.mixed_seed(config.run.seed, world.rank, done))  # for dropout
        self._batches = sampling.batches(
            train, self._plan, self._loader_options(), range(done, self._stop)
        )
        self._means = MeanReducer(world)
        self._items = 0  # tokens, or samples, that the job has trained on
        self._skipped_steps = found.manifest.skipped_steps if found else 0
        self._lock = run_directory.prepare(
            world, config, self._run_dir, found, saves=self._saves.wanted
        )
        if found:
            checkpoint.restore_randomness(found, world)

    def fit(self) -> int:
        """Train to the last step, or to one in which somebody has interrupted. Collective.

        Gives the exit code: 0 when completed, or stopped as asked for; another, as of `ENDS`, when
        it had to end early. Raises TrainingStoppedError when a loss or a gradient is not finite
        (unless such steps are skipped), the ranks' weights differ or the last checkpoint of the job
        cannot be written; the summary says so too.
        """
        steps = self._config.train.steps
        start = time.perf_counter()
        reporter = make_reporter(master=self._world.master, run_dir=self._run_dir, steps=steps)
        status, record = "running", None
        problem: AgreedError | None = None
        with reporter, SignalRequests() as interrupts, _settled_garbage():
            facts = summary.introduction(self._world, self._config, self._model)
            reporter.start(self._world.places, **facts)
            if self._found:
                run_directory.tell(self._found, reporter)
            for step in range(self._done + 1, self._stop + 1):
                begun = time.perf_counter()
                try:
                    record, said = self._step(step, reporter, interrupts)
                except TrainingStoppedError as error:
                    problem = error
                    break
                reporter.step(record)
                status = self._status(step, said)
                if status != "running":
                    break
                self._saves.after(record, self._skipped_steps, said[2:], reporter)
                took = time.perf_counter() - begun
                self._longest_step_s = max(self._longest_step_s, took)
            with interrupts.saving():
                problem = self._save_last(status, record, problem, reporter)
            if problem:
                status = "failed"
            if status == "completed" and self._world.master:
                with compiling.as_written():
                    reporter.text("sample", self._task.sample(self._model) or "")
            facts_at_end = summary.summary(
                self._world,
                self._optimizer,
                status=status,
                last=record,
                skipped_steps=self._skipped_steps,
                items=self._items,
                seconds=time.perf_counter() - start,
                flops_per_s=self._flops * self._pace.median if self._flops else None,
                precision=self._config.train.precision,
                run_dir=self._run_dir,
            )
            facts_at_end["reason"] = self._reason(status, interrupts)
            facts_at_end["resumed_from"] = str(self._found.path) if self._found else None
            facts_at_end |= self._saves.facts()
            reporter.finish({**facts_at_end, "error": str(problem)} if problem else facts_at_end)
        if self._lock is not None:
            os.close(self._lock)
        if problem:
            raise problem
        return ENDS.get(status, 0)

    def _status(self, step: int, said: Sequence[float]) -> str:
        """What becomes of the run after a step."""
        interrupted, preempted, *_ = said
        if step == self._config.train.steps:
            return "completed"
        if step == self._stop:
            return "stopped"
        if preempted:
            return "preempted"
        return "interrupted" if interrupted else "running"

    def _says(self, interrupts: SignalRequests) -> list[float]:
        """What this rank has to say to the others in a step."""
        near = self._deadline.near(self._longest_step_s, self._saves.costs.longest_s)
        preempted = interrupts.preempted or near
        return [float(interrupts.interrupted), float(preempted), *self._saves.says()]

    def _save_last(
        self,
        status: str,
        record: StepRecord | None,
        problem: AgreedError | None,
        reporter: Reporter,
    ) -> AgreedError | None:
        """Save at the end of a job, where it is to be; give what is wrong. Collective.

        A job that is preempted is saved even if nobody asked for checkpoints.
        """
        last = record.step if record else self._done
        if problem or not (record and (self._saves.wanted or status == "preempted")):
            self._saves.settle(reporter, last)
            return problem
        try:
            self._saves.at_end(record, self._skipped_steps, reporter)
        except AgreedError as error:
            if status != "interrupted":
                return self._stopped(str(error))
            reporter.warn(str(error))
        return None

    def _reason(self, status: str, interrupts: SignalRequests) -> str | None:
        """Who or what wanted the job to end early, if anything did. Collective."""
        if status not in ENDS:
            return None
        noted = self._world.gather(interrupts.noted.name if interrupts.noted else None)
        for rank, name in enumerate(noted):
            if name:
                return f"{name} on rank {rank}"
        return self._deadline.why

    def _make_optimizer(
        self, optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]
    ) -> ZeroOptimizer:
        """The optimizer of the configuration, over all ranks. Collective."""
        config = self._config
        return self._world.optimizer(
            self._model,
            optimizer_class,
            stage=config.zero.stage,
            partition=config.zero.partition,
            max_grad_norm=config.optim.max_grad_norm,
            non_finite=config.optim.non_finite,
            loss_scale=self._precision.loss_scale,
            groups=schedule.decayed_and_not(self._model, config.optim.weight_decay),
            **options,
        )

    def _make_scheduler(self) -> LambdaLR:
        """The schedule of this configuration, whatever a checkpoint's was, after what is done."""
        for group in self._optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        factor = schedule.warmup_then_cosine(self._config.optim, self._config.train.steps)
        return LambdaLR(self._optimizer, factor, last_epoch=self._done - 1)

    def _step(
        self, step: int, reporter: Reporter, interrupts: SignalRequests
    ) -> tuple[StepRecord, tuple[float, ...]]:
        """Take one step: 1 for the first. Also gives what ranks said: see `_says`. Collective.

        Between the update and the next forward no rank asks the others anything, but for checks and
        evaluations that are due: updated parameters are on their way meanwhile, and collectives
        have to queue behind them.
        """
        start, phases = time.perf_counter(), PhaseTimer()
        busy_s, waited_s = self._world.collectives.busy_s, self._world.collectives.waited_s
        with phases("data"):
            micro_batches = next(self._batches)
        tally = WeightedSums()
        for left, batch in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
            with phases("forward"), self._precision.computing(self._world.device):
                loss = self._loss(batch)
            with phases("backward"), self._optimizer.no_sync() if left else nullcontext():
                self._optimizer.backward(loss.mean, weight=loss.count)
            tally.add(loss.count, {"loss": loss.mean, **loss.metrics})
        if not micro_batches:
            self._optimizer.share(0)
        with phases("reduce_wait"):
            self._optimizer.synchronize()
            means = self._means(tally, f"in step {step}", self._says(interrupts))
        if means.odd and not self._forgiving:
            raise self._stopped(f"in step {step}, the loss is {means.odd}")
        lr = float(self._scheduler.get_last_lr()[0])
        with phases("optimizer"):
            update = self._update(step)
        if why := _warning(means, update):
            reporter.warn(f"in step {step}, {why}")
        self._skipped_steps += update.skipped
        self._items += means.count
        seconds = time.perf_counter() - start
        self._pace.add(means.count, seconds)
        record = StepRecord(
            step=step,
            loss=means.loss,
            lr=lr,
            grad_norm=None if update.skipped else update.grad_norm,
            clip_coef=None if update.skipped else update.clip_coef,
            clipped_norm=None if update.skipped else update.clipped_norm,
            samples=len(self._plan.indices(step - 1)),
            tokens_per_s=means.count / seconds,
            step_s=seconds,
            **cast(dict[str, Any], phases.seconds),
            communication=self._world.collectives.busy_s - busy_s,
            exposed=self._world.collectives.waited_s - waited_s,
            metrics=means.metrics,
            skipped=update.skipped,
        )
        if _due(self._config.train.check_every, step):
            self._check_sameness(step)
        if step == self._config.train.steps or _due(self._config.train.eval_every, step):
            evaluated = self.evaluate()
            record = replace(record, eval_loss=evaluated.loss, eval_metrics=evaluated.metrics)
        return record, means.said

    def _update(self, step: int) -> StepResult:
        """Update the model, and get ready for the next gradient. Collective."""
        try:
            update = self._optimizer.step()
        except NonFiniteGradientError as error:
            raise self._stopped(f"in step {step}, {error}") from None
        self._optimizer.zero_grad()
        self._scheduler.step()
        return update

    def _loss(self, batch: Any) -> tasks.Loss:
        """The task's loss of a micro-batch, moved to where and what the model is. Local."""
        there = device.move(batch, self._world.device, self._precision.parameters)
        return self._task.loss(self._model, there)

    @torch.no_grad()
    def evaluate(self) -> GlobalMeans:
        """Loss and metrics over the validation samples: exact means. Collective.

        Raises TrainingStoppedError when the loss is not finite.
        """
        self._model.eval()
        tally = WeightedSums()
        for batch in sampling.validation_batches(self._valid, self._loader_options()):
            with self._precision.computing(self._world.device):
                loss = self._loss(batch)
            tally.add(loss.count, {"loss": loss.mean, **loss.metrics})
        self._model.train()
        means = self._means(tally, "in evaluation")
        if means.odd:
            raise self._stopped(f"in evaluation, the loss is {means.odd}")
        return means

    @property
    def _forgiving(self) -> bool:
        """Whether a loss that is not finite is no reason to stop: its step will be skipped."""
        return self._config.optim.non_finite == "skip" or self._precision.loss_scale == "dynamic"

    def _check_sameness(self, step: int) -> None:
        self._optimizer.wait_for_parameters()
        odd = replica_check.odd_ranks(self._world.gather(replica_check.digest(self._model)))
        if odd:
            raise self._stopped(
                f"after step {step}, the weights differ between ranks: "
                f"rank {', '.join(map(str, odd))} against the others"
            )

    def _stopped(self, why: str) -> TrainingStoppedError:
        return TrainingStoppedError(why, self._world.rank)

    def _check_same_data(self, lengths: list[int]) -> None:
        everyone = self._world.gather(lengths)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise AgreedError(
                    f"the data differs between ranks: {everyone[0]} training and validation "
                    f"samples on rank 0, {theirs} on rank {rank}; give all nodes the same files",
                    self._world.rank,
                )

    def _loader_options(self) -> sampling.LoaderOptions:
        return sampling.LoaderOptions(
            rank=self._world.rank,
            size=self._world.size,
            micro_batch_size=self._config.train.micro_batch_size,
            workers=self._config.data.workers,
            start_method=self._config.data.worker_start,
            collate=self._task.collate,
        )


def _warning(means: GlobalMeans, update: StepResult) -> str:
    """What is to be said of a step with a loss or a gradient that is not finite, if it is one."""
    if update.skipped:
        loss = f" and the loss is {means.odd}" if means.odd else ""
        return f"the gradient's norm is {update.grad_norm}{loss}: the step was skipped"
    return f"the loss is {means.odd}, though the gradient is finite" if means.odd else ""


@contextmanager
def _settled_garbage() -> Iterator[None]:
    """Spare what is there from collections of garbage: to look at all of torch takes some 0.2 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
