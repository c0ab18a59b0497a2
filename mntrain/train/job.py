"""Setup of a training job: everything that can be refused, before any work starts."""

import os
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mntrain import checkpoint, tasks
from mntrain.checkpoint import FoundCheckpoint
from mntrain.config import Config
from mntrain.data import sampling
from mntrain.errors import AgreedError
from mntrain.metrics.report import Reporter, make_reporter
from mntrain.train import compiling, run_directory, schedule
from mntrain.train.checkpointing import Checkpointing
from mntrain.train.precision import PRECISIONS
from mntrain.train.signals import Deadline
from mntrain.world import World
from zero.optimizer import ZeroOptimizer


class JobData:
    """The samples of a task: the batches of this rank, and those it validates on. Local."""

    def __init__(self, world: World, config: Config, task: tasks.Task) -> None:
        self._train, self._valid = task.dataset("train"), task.dataset("valid")
        self._valid_subset = sampling.spread(self._valid, config.train.eval_samples)
        self.samples, self.valid_samples = (
            len(cast(Sized, self._train)),
            len(cast(Sized, self._valid)),
        )
        self._plan = sampling.SamplingPlan(self.samples, config.train.batch_size, config.run.seed)
        self._options = sampling.LoaderOptions(
            rank=world.rank,
            size=world.size,
            micro_batch_size=config.train.micro_batch_size,
            workers=config.data.workers,
            start_method=config.data.worker_start,
            collate=task.collate,
        )

    def batches(self, done: int, last_step: int) -> Iterator[Sequence[Any]]:
        """Yield this rank's micro-batches of each step after `done`, to `last_step`."""
        return sampling.batches(self._train, self._plan, self._options, range(done, last_step))

    def validation_batches(self) -> Iterator[Any]:
        """Yield this rank's micro-batches of validation samples."""
        return sampling.validation_batches(self._valid_subset, self._options)

    def batch_size(self, step: int) -> int:
        """Return the number of samples of a step, 1 for the first, over all ranks."""
        return len(self._plan.indices(step - 1))


@dataclass(frozen=True)
class TrainingJob:
    """The parts of a job, constructed and checked."""

    run_dir: Path
    lock: int | None  # descriptor that holds the lock on the run directory, on the master
    resumed: FoundCheckpoint | None
    done: int  # steps before this job
    last_step: int  # of this job
    deadline: Deadline
    task: tasks.Task
    data: JobData
    batches: Iterator[Sequence[Any]]
    model: nn.Module
    optimizer: ZeroOptimizer
    scheduler: LambdaLR
    checkpointing: Checkpointing
    reporter: Reporter


def set_up(world: World, config: Config) -> TrainingJob:
    """Construct and check the parts of a job; make the run directory last. Collective.

    Raises AgreedError for bad input, on all ranks alike.
    """
    # Only the master's deadline counts, since clocks of nodes may differ.
    deadline = Deadline.of(config.run.max_minutes, os.environ if world.master else {})
    run_dir = run_directory.agree_on_path(world, config)
    resumed = run_directory.find_checkpoint(world, config, run_dir)
    done = resumed.manifest.step if resumed else 0
    last_step = min(config.train.steps, done + (config.run.stop_after or config.train.steps))
    with world.agreement():
        task = tasks.load(config.task, config)
        data = JobData(world, config, task)
        torch.manual_seed(config.run.seed)
        model = task.model().to(world.device, PRECISIONS[config.train.precision].parameters)
        optimizer_class, options = schedule.resolve_optimizer(config.optim, world.device)
        if config.train.compile:
            compiling.check(world.device)
    _check_same_data(world, data)
    if resumed:
        run_directory.check_same_run(world, resumed, config, data.samples)
    optimizer = _make_optimizer(world, config, model, optimizer_class, options)
    reporter = make_reporter(world.master, run_dir, config.train.steps)
    saver = checkpoint.Saver(world, model, optimizer, run_dir, config.checkpoint.keep)
    checkpointing = Checkpointing(
        world, config, saver, reporter, samples=data.samples, resumed=resumed
    )
    with world.agreement():
        if checkpointing.wanted:
            saver.check()
    if resumed:
        checkpoint.load(resumed, model, optimizer, world)
    scheduler = _make_scheduler(config, optimizer, done)
    if config.train.compile:
        compiling.compile_regions(task.regions(model))
    torch.manual_seed(sampling.mixed_seed(config.run.seed, world.rank, done))  # for dropout
    batches = data.batches(done, last_step)
    lock = run_directory.prepare(world, config, run_dir, resumed, saves=checkpointing.wanted)
    if resumed:
        checkpoint.restore_randomness(resumed, world)
    return TrainingJob(
        run_dir=run_dir,
        lock=lock,
        resumed=resumed,
        done=done,
        last_step=last_step,
        deadline=deadline,
        task=task,
        data=data,
        batches=batches,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        checkpointing=checkpointing,
        reporter=reporter,
    )


def _check_same_data(world: World, data: JobData) -> None:
    """Raise AgreedError if the lengths of the data differ between ranks. Collective."""
    lengths = world.gather([data.samples, data.valid_samples])
    for rank, others in enumerate(lengths):
        if others != lengths[0]:
            raise AgreedError(
                f"the data differs between ranks: {lengths[0]} training and validation "
                f"samples on rank 0, {others} on rank {rank}; give all nodes the same files",
                world.rank,
            )


def _make_optimizer(
    world: World,
    config: Config,
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    options: dict[str, Any],
) -> ZeroOptimizer:
    """Return the configured optimizer, over all ranks. Collective."""
    return world.optimizer(
        model,
        optimizer_class,
        stage=config.zero.stage,
        partition=config.zero.partition,
        max_grad_norm=config.optim.max_grad_norm,
        non_finite=config.optim.non_finite,
        loss_scale=PRECISIONS[config.train.precision].loss_scale,
        groups=schedule.weight_decay_groups(model, config.optim.weight_decay),
        **options,
    )


def _make_scheduler(config: Config, optimizer: ZeroOptimizer, done: int) -> LambdaLR:
    """Return this configuration's schedule, even if the checkpoint was made with another."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    factor = schedule.warmup_then_cosine(config.optim, config.train.steps)
    return LambdaLR(optimizer, factor, last_epoch=done - 1)
