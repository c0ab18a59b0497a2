"""Setup of a training job: its precision, data, model, optimizer and checkpointing."""

import inspect
import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from mntrain import checkpoint, tasks
from mntrain.checks.storage import existing_folder
from mntrain.config import Config, OptimConfig
from mntrain.data import sampling
from mntrain.data.randomness import mixed_seed
from mntrain.errors import AgreedError
from mntrain.metrics.report import Reporter
from mntrain.run.checkpointing import Checkpointing, SaveInterval
from mntrain.run.directory import start_recording
from mntrain.run.signals import Deadline
from mntrain.train import run_directory
from mntrain.train.fingerprint import differences
from mntrain.train.task_comparison import compare_task, find_random
from mntrain.world import World
from zero.optimizer import ZeroOptimizer

# Optimizers of torch.optim that a training step cannot drive, and the reason.
UNSUPPORTED = {
    "LBFGS": "it runs the forward by itself",
    "Muon": "it takes matrices only, and models have vectors too",
    "SparseAdam": "gradients here are dense",
}
# Optimizers whose fused GPU kernel is used. The fused CPU kernels round an element by its position
# in the tensor, so results would depend on how shards are cut.
FUSED = {"Adam", "AdamW", "SGD"}


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model and of its forward, and the scaling of its loss, by --train.precision."""

    parameters: torch.dtype | None = None  # and of buffers and gradients; None: the task's choice
    autocast: torch.dtype | None = None  # None: forward runs in the parameters' dtype
    loss_scale: Literal["dynamic"] | None = None


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(autocast=torch.bfloat16),
    "bf16-pure": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16, loss_scale="dynamic"),  # small gradients would underflow
}


class TrainingJob:
    """The parts of a job, checked before any work starts.

    Construction is collective, writes into the run directory last, and raises AgreedError for bad
    input, on all ranks alike.
    """

    def __init__(self, world: World, config: Config) -> None:
        # Only the master's deadline counts, since clocks of nodes may differ.
        self.deadline = Deadline(config.run.max_minutes, os.environ if world.master else {})
        self.run_dir = run_directory.agree_on_path(world, config)
        try:
            self._set_up(world, config, self.run_dir)
        except AgreedError:
            run_directory.discard(world, config, self.run_dir)
            raise

    def _set_up(self, world: World, config: Config, run_dir: Path) -> None:
        """Check the input, and make the parts of the job. Collective."""
        self.resumed = resumed = run_directory.find_checkpoint(world, config, run_dir)
        self.done = resumed.manifest.step if resumed else 0  # steps before this job
        steps = config.run.stop_after or config.train.steps
        self.last_step = min(config.train.steps, self.done + steps)
        self.precision = PRECISIONS[config.train.precision]
        with world.agreement():
            self.task = tasks.load(config.task, config)
            self.data = JobData(world, config, self.task)
        self.fingerprint = compare_task(world, self.task, self.data.datasets)
        with world.agreement():
            torch.manual_seed(config.run.seed)
            self.model = self.task.model().to(world.device, self.precision.parameters)
            optimizer_class, options = resolve_optimizer(config.optim, world.device)
            if config.train.compile:
                check_compiler(world.device)
        if resumed:
            run_directory.check_same_run(world, resumed, config, self.data.samples)
        self.optimizer = world.optimizer(
            self.model,
            optimizer_class,
            stage=config.zero.stage,
            partition=config.zero.partition,
            max_grad_norm=config.optim.max_grad_norm,
            non_finite=config.optim.non_finite,
            loss_scale=self.precision.loss_scale,
            groups=weight_decay_groups(self.model, config.optim.weight_decay),
            overlap_forward=True,
            **options,
        )
        self._set_up_checkpoints(world, config)
        if config.train.compile:
            compile_regions(self.task.regions(self.model))
        # Seeds dropout.
        torch.manual_seed(mixed_seed(config.run.seed, world.rank, self.done))
        self.batches = self.data.batches(self.done, self.last_step)
        self.lock = run_directory.prepare(world, config, run_dir, resumed, saves=self.saves)
        start_recording(world, run_dir, config.run.recorder)
        if resumed:
            checkpoint.restore_randomness(resumed, world)

    def _set_up_checkpoints(self, world: World, config: Config) -> None:
        """Set up reports, checkpointing and the learning rate; load a checkpoint. Collective."""
        resumed = self.resumed
        self.reporter = Reporter(world.master, self.run_dir, config.train.steps)
        saver = checkpoint.Saver(
            world, self.model, self.optimizer, self.run_dir, config.checkpoint.keep
        )
        interval = SaveInterval(config.checkpoint.every, config.checkpoint.mtbf_hours)
        self.checkpointing = Checkpointing(
            world, saver, interval, self.reporter.note, self.reporter.warn
        )
        run = config.run
        # True if this job leaves a checkpoint at its end in any case.
        self.saves = interval.wanted or run.stop_after is not None or run.max_minutes is not None
        with world.agreement():
            if self.saves:
                saver.check()
        if self.saves:
            self._warn_of_little_space(world, sharded=config.zero.stage > 0 and world.size > 1)
        if resumed:
            self.checkpointing.continue_from(resumed)
            options = run_directory.JOB_OPTIONS
            checkpoint.load(resumed, self.model, self.optimizer, world, kept_options=options)
        # This configuration's schedule counts, even if the checkpoint was made with another.
        self.scheduler = make_scheduler(self.optimizer, config.optim, config.train.steps, self.done)

    def changed_data(self) -> list[str]:
        """Return what of the data differs from that of the checkpoint, by name. Local."""
        if self.resumed is None:
            return []
        random = partial(find_random, self.data.datasets)
        return differences(self.resumed.manifest.data, self.fingerprint, random)

    def _warn_of_little_space(self, world: World, *, sharded: bool) -> None:
        """Warn if a checkpoint will not fit on the disk. Collective."""
        memory = self.optimizer.expected_memory()
        own = memory.state + memory.master
        nbytes = world.sum([own])[0] if sharded else own
        nbytes += sum(tensor.nbytes for tensor in self.model.state_dict().values())
        with suppress(OSError):
            folder = existing_folder(self.run_dir)
            if world.master and (free := shutil.disk_usage(folder).free) < nbytes:
                self.reporter.warn(
                    f"a checkpoint takes about {nbytes / 1e6:.1f} MB, and {folder} has "
                    f"{free / 1e6:.1f} MB free: free space, or give another --run.dir"
                )


class JobData:
    """The samples of a task: the batches of this rank, and those it validates on. Local."""

    def __init__(self, world: World, config: Config, task: tasks.Task) -> None:
        self._train = _sized(task.dataset("train"), "training", config.task)
        self.datasets: dict[str, Dataset[Any]] = {"training": self._train}
        self._valid: Dataset[Any] | None = None
        if (valid := task.dataset("valid")) is not None:
            sized = _sized(valid, "validation", config.task)
            if len(cast(Sized, sized)):
                self._valid = sampling.spread(sized, config.train.eval_samples)
                self.datasets["validation"] = sized
        self.samples = len(cast(Sized, self._train))
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

    @property
    def validates(self) -> bool:
        """True if there are validation samples."""
        return self._valid is not None

    def validation_batches(self) -> Iterator[Any]:
        """Yield this rank's micro-batches of validation samples, if there are any."""
        return sampling.validation_batches(self._valid, self._options) if self._valid else iter(())

    def batch_size(self, step: int) -> int:
        """Return the number of samples of a step, 1 for the first, over all ranks."""
        return len(self._plan.indices(step - 1))


def _sized(dataset: Any, name: str, task: str) -> Dataset[Any]:
    """Return a dataset that has a length. Raises ValueError for one without."""
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"the {name} data of --task {task} is a {type(dataset).__name__} without a length: "
            "give a dataset with __len__ and __getitem__, or use world.shard in a loop of your own "
            "for streams"
        )
    return cast(Dataset[Any], dataset)


def resolve_optimizer(
    config: OptimConfig, device: torch.device
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the torch.optim class that is configured, and the options to construct it with.

    On a GPU the options ask for the fused kernel where the class has one. Raises ValueError for a
    name that torch.optim lacks or that cannot be used here, and for weight decay that the class
    does not take.
    """
    if config.name in UNSUPPORTED:
        raise ValueError(f"--optim.name {config.name}: {UNSUPPORTED[config.name]}; choose another")
    kind = getattr(torch.optim, config.name, Optimizer)
    if kind is Optimizer or not (inspect.isclass(kind) and issubclass(kind, Optimizer)):
        known = {name.lower(): name for name in dir(torch.optim) if name[0].isupper()}
        del known["optimizer"]  # the base class
        near = [known[name] for name in get_close_matches(config.name.lower(), known)] or ["AdamW"]
        raise ValueError(
            f"--optim.name {config.name}: torch.optim has no such optimizer; "
            f"nearest: {', '.join(near)}"
        )
    parameters = inspect.signature(kind).parameters
    if config.weight_decay and "weight_decay" not in parameters:
        raise ValueError(
            f"--optim.weight-decay {config.weight_decay}: {config.name} takes no weight decay; "
            "give --optim.weight-decay 0"
        )
    options: dict[str, Any] = {"lr": config.lr}
    if config.name in FUSED and "fused" in parameters:
        options["fused"] = True if device.type == "cuda" else None  # None: torch's default
    return kind, options


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups of a model: matrices with weight decay, vectors without.

    Only parameters that require a gradient, and no empty group; one group without weight decay.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not weight_decay:
        return [{"params": trained}]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_scheduler(
    optimizer: ZeroOptimizer, config: OptimConfig, steps: int, done: int
) -> LambdaLR:
    """Return the learning-rate schedule of a run of `steps` steps, of which `done` are taken."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(optimizer, warmup_then_cosine(config, steps), last_epoch=done - 1)


def warmup_then_cosine(config: OptimConfig, steps: int) -> Callable[[int], float]:
    """Return the learning-rate factor as a function of the number of completed steps.

    Linear up to 1 over the warm-up, then a half cosine down to `min_lr_fraction` at the last step.
    Source: Loshchilov and Hutter, "SGDR", 2017 (arXiv 1608.03983), without restarts.
    """
    warmup, least = config.warmup_steps, config.min_lr_fraction

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        progress = min(1.0, (done - warmup) / max(1, steps - 1 - warmup))
        return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2

    return factor


def check_compiler(device: torch.device) -> None:
    """Raise ValueError if a tool that torch.compile needs is missing. Local."""
    needs = "--train.compile: torch.compile needs"
    language, variable, compilers = "C++", "CXX", ["g++"]
    if device.type == "cuda":  # triton compiles its launchers
        language, variable, compilers = "C", "CC", ["gcc", "clang"]
        if find_spec("triton") is None:
            raise ValueError(f"{needs} triton: pip install triton, or leave the option out")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            raise ValueError(f"{needs} Python.h: install python3-dev, or leave the option out")
    named = os.environ.get(variable)
    if not any(map(shutil.which, [named] if named else compilers)):
        raise ValueError(
            f"{needs} a {language} compiler, and there is no {named or compilers[0]}: install one, "
            f"name it in {variable}, or leave the option out"
        )


def compile_regions(regions: Sequence[nn.Module], backend: str = "inductor") -> None:
    """Make each module compile its forward when it is first called. In place.

    All gradients of a compiled graph arrive when its backward ends. A model that is compiled as a
    whole would send nothing before that, so its regions are compiled one by one.
    """
    for region in regions:
        if region.forward.__module__.startswith("torch."):
            # torch.compile skips the forward of torch's own modules unless another function calls
            # it, so Module.compile would have no effect (as of torch 2.13).
            region._compiled_call_impl = torch.compile(_caller(region), backend=backend)
        else:
            region.compile(backend=backend)


def _caller(region: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return region._call_impl(*args, **kwargs)

    return call


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which regions run uncompiled, for shapes that occur once.

    Before torch 2.6 it has no effect.
    """
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance else nullcontext()
