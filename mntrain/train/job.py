"""Setup of a training job: its precision, data, model, optimizer and checkpointing."""

import os
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from mntrain import tasks
from mntrain.alike.compared_task import compare_task
from mntrain.balance.shares import Shares
from mntrain.checkpoint import Manifest, Saved, Stateful
from mntrain.data.balancing import StepBalancing
from mntrain.data.randomness import mixed_seed
from mntrain.errors import AgreedError
from mntrain.metrics.copies import expect_installed
from mntrain.metrics.files import CONFIG_FILE
from mntrain.metrics.registry import RecentSteps, StepRecord
from mntrain.metrics.report import Reporter
from mntrain.options.command_line import to_toml
from mntrain.options.config import Config
from mntrain.recorder.launch_notes import LaunchNotes
from mntrain.run.directory import RunDirectory, warn
from mntrain.run.metrics_log import MetricsLog
from mntrain.run.saving import Checkpoints, SaveReports
from mntrain.sync import LocalSGD
from mntrain.timeline import StepTimeline
from mntrain.train import resumption
from mntrain.train.evaluation import BestMetric, try_evaluation
from mntrain.train.forward import (
    PRECISIONS,
    check_compiler,
    compile_regions,
    recompute_regions,
)
from mntrain.train.initialization import freeze, load_weights
from mntrain.train.job_data import JobData
from mntrain.train.optimization import LearningRates, choose_optimizer
from mntrain.world import World
from zero.layout import split


def warn_of_launch(config: Config) -> None:
    """Warn of a job that `mntrain launch` cannot start again. Local."""
    lasts = config.run.dir is not None and config.checkpoint.wanted
    if LaunchNotes.of(os.environ) is not None and not lasts:
        warn(
            "mntrain launch cannot resume this job after a loss: give --run.dir and "
            "--checkpoint.every, such as --run.dir runs/a --checkpoint.every auto"
        )


@dataclass
class JobResult:
    """The end of a job, and its counters: the same on all ranks except for times."""

    flops_per_item: float | None  # of the model, if the task knows it
    skipped_steps: int  # earlier jobs of the run included
    status: str = "running"  # until the end
    last: StepRecord | None = None  # the last completed step of this job, if any
    evaluated: StepRecord | None = None  # the last one after which there was an evaluation
    error: AgreedError | None = None
    reason: str | None = None  # of an early end
    items: int = 0  # tokens or samples that this job has trained on
    seconds: float = 0.0  # of this job
    _rates: RecentSteps[float] = field(default_factory=lambda: RecentSteps(1000))

    def add(self, items: int, seconds: float, *, skipped: bool) -> None:
        """Count a step."""
        self.items += items
        self.skipped_steps += skipped
        self._rates.add(items / seconds)

    @property
    def items_per_s(self) -> float:
        """Median over the last 1000 steps after the warm-up; 0 before the first step."""
        return median(self._rates.values) if self._rates.values else 0.0


class TrainingJob:
    """The parts of a job, checked before any work starts.

    Construction is collective, writes into the run directory last, and raises AgreedError for bad
    input, on all ranks alike.
    """

    def __init__(self, world: World, config: Config, task: tasks.Given | None = None) -> None:
        self.directory = RunDirectory(world, config.run.dir)
        self.run_dir = self.directory.path
        try:
            self._set_up(world, config, config.task if task is None else task)
        except AgreedError:
            self.directory.discard()
            raise

    def _set_up(self, world: World, config: Config, task: tasks.Given) -> None:
        with world.agreement():
            if world.master:
                expect_installed(config.log)
                warn_of_launch(config)
        self.config = config
        self.directory.open_local(config.checkpoint.local)
        self.resumed = resumed = resumption.find_checkpoint(world, config, self.directory)
        self.last_step_before = self.directory.last_step  # of the run's metrics
        self.done = resumed.manifest.step if resumed else 0  # steps before this job
        self.precision = PRECISIONS[config.train.precision]
        with world.agreement():
            self.task = tasks.load(task, config)
        with world.agreement():
            self.data = JobData(world, config, self.task, resumed)
            self.steps = self.data.steps(config.train)  # of the run
        resumption.check_left(world, resumed, config, self.steps)
        self.last_step = min(config.run.stop_after or self.steps, self.steps)
        train = replace(config.train, steps=self.steps, epochs=None)
        self.task.config = replace(config, train=train)
        compared = self.task.compared_values, self.task.compared_files
        self.data_facts = compare_task(world, type(self.task), *compared, self.data.datasets)
        self._make_model(world, config)
        self._make_optimizer(world, config)
        self._set_up_reports(world, config)
        self._set_up_checkpoints(world, config)
        if config.train.recompute:
            recompute_regions(self.task.regions(self.model))
        if config.train.compile:
            compile_regions(self.task.regions(self.model))
        # Seeds dropout.
        torch.manual_seed(mixed_seed(config.run.seed, world.rank, self.done))
        self.batches = self.data.batches(self.done, self.last_step)
        self._saved_config = resumption.to_json(config)
        skipped_steps = resumed.manifest.skipped_steps if resumed else 0
        self.result = JobResult(self.task.flops_per_item(self.model), skipped_steps)
        self._begin_run(world, config)
        self.directory.start_recording(config.run.recorder)
        self.metrics = MetricsLog(world, self.directory, config.log, warn=self.reporter.warn)
        world.watchdog.at_end.append(lambda *_: self.reporter.end_display())

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation follows a step. Local."""
        every = self.config.train.eval_every
        due = step == self.steps or (every > 0 and step % every == 0)
        return due and bool(self.data.validation_sets)

    def _manifest(self, step: int, eval_loss: float | None) -> Manifest:
        """Return what a checkpoint after the last step records of the run. Local."""
        record = self.result.last
        assert record is not None, "a step was taken"
        return Manifest(
            step=step,
            config=self._saved_config,
            samples=self.data.samples,
            skipped_steps=self.result.skipped_steps,
            eval_loss=record.eval_loss,
            data=self.data_facts,
            scored_by=self.best.text,
            position=self.data.position(step),
            score=self.best.score(record),
        )

    def _make_model(self, world: World, config: Config) -> None:
        """Make the model, and choose what trains it and how nodes exchange. Collective."""
        with world.agreement():
            self.sync = choose_sync(world, config, weighted=isinstance(self.data.plans, Shares))
            torch.manual_seed(config.run.seed)
            self.initial_weights: tuple[str, list[str]] | None = None
            self.model = tasks.make_model(self.task).to(world.device, self.precision.parameters)
            freeze(self.model, config.init.freeze)
            self.optimizer_name, self._bound_optimizer = choose_optimizer(
                self.task, self.model, config.optim, world.device
            )
            if config.train.compile:
                check_compiler(world.device)
        if self.resumed:
            resumption.check_same_run(
                world, self.resumed, config, self.data.samples, self.data_facts["values"]
            )
        with world.agreement():
            if not self.resumed and config.init.from_ is not None and world.master:
                # The optimizer spreads them.
                self.initial_weights = load_weights(self.model, config.init.from_)

    def _make_optimizer(self, world: World, config: Config) -> None:
        bound = self._bound_optimizer
        self.optimizer = world.optimizer(
            self.model,
            bound.func,
            stage=config.zero.stage,
            partition=config.zero.partition,
            max_grad_norm=config.optim.max_grad_norm,
            non_finite=config.optim.non_finite,
            loss_scale=self.precision.loss_scale,
            sync=self.sync,
            groups=bound.args[0],
            overlap_forward=True,
            check_every=config.train.check_every,
            **bound.keywords,
        )
        self.optimizer.clip_each_rank(config.balance.max_rank_grad_norm)
        self.best = BestMetric(config.checkpoint.best, config.train.patience)
        with world.agreement():
            try_evaluation(self.task, self.model, self.data, self.precision, self.best)

    def _set_up_reports(self, world: World, config: Config) -> None:
        self.reporter = Reporter(world.master, self.steps, self.task.items)
        note, warn, recorded = self.reporter.note, self.reporter.warn, config.log.timeline
        with world.agreement():
            self.timeline = StepTimeline(
                world, self.run_dir, recorded, self.steps, note=note, warn=warn
            )
        advice = "; --balance.mode throughput would give it a smaller part of each batch"
        self.balancing = StepBalancing(
            world,
            self.data.plans,
            note=note,
            warn=warn,
            advice="" if self.data.plans or self.data.stream else advice,
            last_step=self.last_step,
            every=self.sync.every if self.sync else 1,
        )
        with world.agreement():
            self.learning_rates = LearningRates(self.task, self.optimizer, config.optim, self.steps)

    def _set_up_checkpoints(self, world: World, config: Config) -> None:
        """Set up checkpointing. Collective."""
        objects: dict[str, Stateful] = {**self.learning_rates.objects}
        if self.data.stream:
            objects["data"] = self.data
        if self.best.patience:
            objects["early stopping"] = self.best
        self._saved = Saved(self.model, self.optimizer, objects)
        run, reporter = config.run, self.reporter
        # True if this job leaves a checkpoint at its end in any case.
        self.saves = config.checkpoint.wanted or run.stop_after is not None
        self.saves = self.saves or run.max_minutes is not None
        self.checkpoints = Checkpoints(
            world,
            self.directory,
            self._saved,
            config.checkpoint,
            SaveReports(reporter.note, reporter.warn, on_checkpoint=self.task.on_checkpoint),
            scored_by=self.best.text,
            may_save=self.saves,
            manifest=self._manifest,
        )

    def _begin_run(self, world: World, config: Config) -> None:
        """Begin in the run's directory, or continue from a checkpoint. Collective."""
        with world.agreement():
            options = to_toml(resumption.with_absolute_paths(config)).encode()
            files = {CONFIG_FILE: options, **self.task.run_files()}
        known = {**self._saved.objects}
        if self.resumed and "early stopping" not in self.resumed.manifest.objects:
            known.pop("early stopping", None)  # it had no patience then
        # This job's options count, even if the checkpoint was made with others. Only a learning
        # rate that a scheduler with a state has set is the checkpoint's.
        kept = ["weight_decay"] if self.learning_rates.objects else ["weight_decay", "lr"]
        self.checkpoints.resume(self.resumed, known, kept_options=kept, files=files)
        self.learning_rates.start(self.done)


def choose_sync(world: World, config: Config, *, weighted: bool = False) -> LocalSGD | None:
    """Return how nodes exchange parameters; None if every step is synchronous, as on one node.

    If it is `weighted`, nodes count in an exchange by the items of their steps.

    Raises ValueError if there are too few samples for the nodes, and for another option that says
    what crosses nodes. Local.
    """
    nodes, description = len(world.topology.nodes), config.sync.description
    if description is None or nodes == 1:
        return None
    if config.comm.compress != "none":
        raise ValueError(
            f"--comm.compress {config.comm.compress} compresses what crosses nodes in every step, "
            f"and --sync.mode {config.sync.mode} exchanges rarely: give one of the two"
        )
    bounds = split(config.train.batch_size, world.size)
    if any(all(bounds[r] == bounds[r + 1] for r in node) for node in world.topology.nodes):
        raise ValueError(
            f"--train.batch-size {config.train.batch_size}: with --sync.mode {config.sync.mode}, "
            f"each of the {nodes} nodes needs a sample in each step; give at least {world.size}"
        )
    return replace(description, weighted=weighted)
