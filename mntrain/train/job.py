"""Setup of a training job: its precision, data, model, optimizer and checkpointing."""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.data import Dataset

from mntrain import checkpoint, tasks
from mntrain.checkpoint import FoundCheckpoint, Stateful
from mntrain.checks.storage import existing_folder
from mntrain.config import Config
from mntrain.data import sampling
from mntrain.data.randomness import mixed_seed
from mntrain.errors import AgreedError
from mntrain.metrics.report import Reporter
from mntrain.metrics.writers import expect_installed
from mntrain.run.checkpointing import Checkpointing, SaveInterval
from mntrain.run.directory import start_recording
from mntrain.run.signals import Deadline
from mntrain.train import run_directory
from mntrain.train.evaluation import BestMetric, EarlyStopping
from mntrain.train.fingerprint import differences
from mntrain.train.initialization import LoadedWeights, freeze, load_weights
from mntrain.train.optimization import Schedule, choose_optimizer
from mntrain.train.task_comparison import compare_task, find_random
from mntrain.world import World


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
        with world.agreement():
            if world.master:
                expect_installed(config.log)
        self.resumed = resumed = run_directory.find_checkpoint(world, config, run_dir)
        self.done = resumed.manifest.step if resumed else 0  # steps before this job
        steps = config.run.stop_after or config.train.steps
        self.last_step = min(config.train.steps, self.done + steps)
        self.precision = PRECISIONS[config.train.precision]
        with world.agreement():
            self.task = tasks.load(config.task, config)
            self.data = JobData(world, config, self.task, resumed)
        self.fingerprint = compare_task(world, self.task, self.data.datasets)
        with world.agreement():
            torch.manual_seed(config.run.seed)
            self.initial_weights: LoadedWeights | None = None
            self.model = self.task.model().to(world.device, self.precision.parameters)
            self.frozen = freeze(self.model, config.init.freeze)
            self.choice = choose_optimizer(self.task, self.model, config.optim, world.device)
            if config.train.compile:
                check_compiler(world.device)
        if resumed:
            run_directory.check_same_run(
                world, resumed, config, self.data.samples, self.fingerprint["values"]
            )
        else:
            self._load_initial_weights(world, config)
        self.optimizer = world.optimizer(
            self.model,
            self.choice.kind,
            stage=config.zero.stage,
            partition=config.zero.partition,
            max_grad_norm=config.optim.max_grad_norm,
            non_finite=config.optim.non_finite,
            loss_scale=self.precision.loss_scale,
            groups=self.choice.groups,
            overlap_forward=True,
            **self.choice.options,
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

    def _load_initial_weights(self, world: World, config: Config) -> None:
        """Load the weights of --init.from on the master. Collective; its optimizer spreads them."""
        path = config.init.from_
        with world.agreement():
            if path is not None and world.master:
                self.initial_weights = load_weights(self.model, path)

    def _set_up_checkpoints(self, world: World, config: Config) -> None:
        """Set up reports, checkpointing and the learning rate; load a checkpoint. Collective."""
        resumed = self.resumed
        self.reporter = Reporter(world.master, self.run_dir, config.train.steps, log=config.log)
        with world.agreement():
            self.schedule = Schedule(self.task, self.optimizer, config.optim, config.train.steps)
        self.best = BestMetric(config.checkpoint.best)
        self.early_stopping = EarlyStopping(config.train.patience)
        objects: dict[str, Stateful] = {**self.schedule.objects}
        if self.early_stopping.enabled:
            objects["early stopping"] = self.early_stopping
        saver = checkpoint.Saver(
            world,
            self.model,
            self.optimizer,
            self.run_dir,
            config.checkpoint.keep,
            objects=objects,
        )
        interval = SaveInterval(config.checkpoint.every, config.checkpoint.mtbf_hours)
        self.checkpointing = Checkpointing(
            world,
            saver,
            interval,
            self.reporter.note,
            self.reporter.warn,
            scored_by=self.best.text,
            on_checkpoint=self.task.on_checkpoint,
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
            known = resumed.manifest.objects
            if self.schedule.objects.keys() - known.keys():
                raise AgreedError(
                    f"{resumed.path} has no state of the task's schedule, which was added since: "
                    "give another --run.dir to begin anew",
                    world.rank,
                )
            objects = {name: value for name, value in objects.items() if name in known}
            # This job's options count, even if the checkpoint was made with others. Only a learning
            # rate that a scheduler with a state has set is the checkpoint's.
            kept = [
                name
                for name in run_directory.JOB_OPTIONS
                if name != "lr" or not self.schedule.objects
            ]
            checkpoint.load(
                resumed, self.model, self.optimizer, world, objects=objects, kept_options=kept
            )
        self.schedule.start(self.done)

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

    def __init__(
        self, world: World, config: Config, task: tasks.Task, resumed: FoundCheckpoint | None
    ) -> None:
        self._train = _sized(task.dataset("train"), "training", config.task)
        self.datasets: dict[str, Dataset[Any]] = {"training": self._train}
        self._valid: Dataset[Any] | None = None
        if (valid := task.dataset("valid")) is not None:
            sized = _sized(valid, "validation", config.task)
            if len(cast(Sized, sized)):
                self._valid = sampling.spread(sized, config.train.eval_samples)
                self.datasets["validation"] = sized
        self.samples = len(cast(Sized, self._train))
        self._plan = sampling.SamplingPlan(
            self.samples,
            config.train.batch_size,
            config.run.seed,
            drop_last=config.data.drop_last,
            origin=_find_origin(resumed, self.samples),
        )
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
        return self._plan.length(step - 1)

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch and the offset of the first sample after a step, 1 for the first."""
        _, epoch, offset = self._plan.position(step)
        return epoch, offset


def _find_origin(resumed: FoundCheckpoint | None, samples: int) -> sampling.Position:
    """Return where a run continues: after the samples that it has seen, in their order."""
    if resumed is None:
        return sampling.BEGIN
    manifest = resumed.manifest
    if manifest.position is None:  # saved by an earlier version
        batch_size = manifest.config.get("train", {}).get("batch_size", 1)
        before = sampling.SamplingPlan(max(1, manifest.samples), batch_size, seed=0)
        return before.position(manifest.step)
    epoch, offset = manifest.position
    if offset >= samples:  # there are fewer than before
        epoch, offset = epoch + 1, 0
    return sampling.Position(manifest.step, epoch, offset)


def _sized(dataset: Any, name: str, task: str) -> Dataset[Any]:
    """Return a dataset that has a length. Raises ValueError for one without."""
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"the {name} data of --task {task} is a {type(dataset).__name__} without a length: "
            "give a dataset with __len__ and __getitem__, or use world.shard in a loop of your own "
            "for streams"
        )
    return cast(Dataset[Any], dataset)


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
