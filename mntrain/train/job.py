"""Setup of a training job: its precision, data, model, optimizer and checkpointing."""

import os
from collections.abc import Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mntrain import checkpoint, tasks
from mntrain.config import Config
from mntrain.data import sampling
from mntrain.errors import AgreedError
from mntrain.metrics.report import make_reporter
from mntrain.train import compiling, run_directory, schedule
from mntrain.train.checkpointing import Checkpointing
from mntrain.train.signals import Deadline
from mntrain.world import World
from zero.optimizer import ZeroOptimizer


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model and of its forward, and the scaling of its loss, by --train.precision."""

    parameters: torch.dtype | None = None  # and of buffers and gradients; None: the task's choice
    autocast: torch.dtype | None = None  # None: forward runs in the parameters' dtype
    loss_scale: Literal["dynamic"] | None = None

    def autocast_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context to run forward in. Local."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(autocast=torch.bfloat16),
    "bf16-pure": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16, loss_scale="dynamic"),  # small gradients would underflow
}


class JobData:
    """The samples of a task: the batches of this rank, and those it validates on. Local."""

    def __init__(self, world: World, config: Config, task: tasks.Task) -> None:
        self._train, self._valid = task.dataset("train"), task.dataset("valid")
        self._valid_subset = sampling.spread(self._valid, config.train.eval_samples)
        self.samples = len(cast(Sized, self._train))
        self.valid_samples = len(cast(Sized, self._valid))
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


class TrainingJob:
    """The parts of a job, checked before any work starts.

    Construction is collective, makes the run directory last, and raises AgreedError for bad input,
    on all ranks alike.
    """

    def __init__(self, world: World, config: Config) -> None:
        # Only the master's deadline counts, since clocks of nodes may differ.
        self.deadline = Deadline.of(config.run.max_minutes, os.environ if world.master else {})
        self.run_dir = run_dir = run_directory.agree_on_path(world, config)
        self.resumed = resumed = run_directory.find_checkpoint(world, config, run_dir)
        self.done = resumed.manifest.step if resumed else 0  # steps before this job
        steps = config.run.stop_after or config.train.steps
        self.last_step = min(config.train.steps, self.done + steps)
        with world.agreement():
            self.task = tasks.load(config.task, config)
            self.data = JobData(world, config, self.task)
            torch.manual_seed(config.run.seed)
            dtype = PRECISIONS[config.train.precision].parameters
            self.model = self.task.model().to(world.device, dtype)
            optimizer_class, options = schedule.resolve_optimizer(config.optim, world.device)
            if config.train.compile:
                compiling.check(world.device)
        _check_same_data(world, self.data)
        if resumed:
            run_directory.check_same_run(world, resumed, config, self.data.samples)
        self.optimizer = _make_optimizer(world, config, self.model, optimizer_class, options)
        self.reporter = make_reporter(world.master, run_dir, config.train.steps)
        saver = checkpoint.Saver(world, self.model, self.optimizer, run_dir, config.checkpoint.keep)
        self.checkpointing = Checkpointing(
            world, config, saver, self.reporter, samples=self.data.samples, resumed=resumed
        )
        with world.agreement():
            if self.checkpointing.wanted:
                saver.check()
        if resumed:
            checkpoint.load(resumed, self.model, self.optimizer, world)
        self.scheduler = _make_scheduler(config, self.optimizer, self.done)
        if config.train.compile:
            compiling.compile_regions(self.task.regions(self.model))
        # Seeds dropout.
        torch.manual_seed(sampling.mixed_seed(config.run.seed, world.rank, self.done))
        self.batches = self.data.batches(self.done, self.last_step)
        self.lock = run_directory.prepare(
            world, config, run_dir, resumed, saves=self.checkpointing.wanted
        )
        if resumed:
            checkpoint.restore_randomness(resumed, world)


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
