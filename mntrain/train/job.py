"""The objects of a training job, which its options describe: data, model, optimizer, services."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from mntrain import tasks
from mntrain.alike.compared_task import compare_task
from mntrain.balance.shares import Shares
from mntrain.checkpoint import FoundCheckpoint, Stateful
from mntrain.data.balancing import StepBalancing
from mntrain.data.randomness import mixed_seed
from mntrain.errors import AgreedError
from mntrain.metrics.copies import expect_installed
from mntrain.metrics.display import Display
from mntrain.metrics.files import CONFIG_FILE, write_whole
from mntrain.options.command_line import to_toml
from mntrain.options.config import Config
from mntrain.output import print_warning
from mntrain.recorder.launch_notes import LaunchNotes
from mntrain.run.directory import RunDirectory
from mntrain.run.local_saving import passed_over, restored_from
from mntrain.run.metrics_log import MetricsLog
from mntrain.run.saving import Checkpoints
from mntrain.sync import LocalSGD
from mntrain.timeline import StepTimeline
from mntrain.train import resumption
from mntrain.train.evaluation import BestMetric, try_evaluation
from mntrain.train.forward import (
    PRECISIONS,
    Precision,
    check_compiler,
    compile_regions,
    recompute_regions,
)
from mntrain.train.initialization import freeze, load_weights
from mntrain.train.job_data import JobData
from mntrain.train.optimization import (
    choose_optimizer,
    moved_options,
    options_scheduler,
    scheduler_of,
)
from mntrain.world import World
from zero.layout import split
from zero.optimizer import ZeroOptimizer
from zero.param_groups import hyperparameters


@dataclass(frozen=True)
class Trained:
    """The model of a job, and what trains it."""

    model: nn.Module
    optimizer: ZeroOptimizer
    scheduler: LRScheduler
    precision: Precision
    sync: LocalSGD | None  # how nodes exchange; None: every step is synchronous
    names: tuple[str, str]  # of the optimizer and the scheduler
    keeps_scheduler: bool  # the scheduler is the task's, whose state checkpoints hold
    own_options: list[str]  # of the groups; all but those that a scheduler with a state sets
    weights: tuple[str, list[str]] | None  # that were loaded, and what of them does not fit


@dataclass(frozen=True)
class Job:
    """The objects of a job, which are made and checked before any work starts: see `set_up`."""

    config: Config
    directory: RunDirectory
    resumed: FoundCheckpoint | None
    restored: str  # in words, with the steps of metrics.jsonl that are taken again
    task: tasks.Task
    data: JobData
    data_facts: dict[str, Any]  # that a resumed run compares
    steps: int  # of the run
    last_step: int  # of this job, unless it ends early
    trained: Trained
    best: BestMetric
    display: Display
    timeline: StepTimeline
    balancing: StepBalancing
    checkpoints: Checkpoints
    metrics: MetricsLog

    @cached_property
    def saved_config(self) -> dict[str, Any]:
        """The options, as checkpoints have them."""
        return resumption.to_json(self.config)

    @property
    def done(self) -> int:
        """The steps before this job."""
        return self.resumed.manifest.step if self.resumed else 0

    @property
    def saves(self) -> bool:
        """True if the job leaves a checkpoint at its end in any case."""
        return _saves(self.config)

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation follows a step. Local."""
        every = self.config.train.eval_every
        due = step == self.steps or (every > 0 and step % every == 0)
        return due and bool(self.data.validation_sets)


def set_up(world: World, config: Config, given: tasks.Given | None = None) -> Job:
    """Make the objects of a job, and begin its run or resume it. Collective.

    `given` is the task, if not that of the options. Raises AgreedError for bad input, on all ranks
    alike, before anything is written into the run directory.
    """
    with world.agreement():
        if world.master:
            expect_installed(config.log)
            warn_of_launch(config)
    directory = world.own_loop.directory(config.run.dir, config.run.recorder)
    try:
        return _set_up(world, config, directory, config.task if given is None else given)
    except AgreedError:
        directory.close()
        raise


def warn_of_launch(config: Config) -> None:
    """Warn of a job that `mntrain launch` cannot start again. Local."""
    lasts = config.run.dir is not None and config.checkpoint.wanted
    if LaunchNotes.of(os.environ) is not None and not lasts:
        print_warning(
            "mntrain launch cannot resume this job after a loss: give --run.dir and "
            "--checkpoint.every, such as --run.dir runs/a --checkpoint.every auto"
        )


def _set_up(world: World, config: Config, directory: RunDirectory, given: tasks.Given) -> Job:
    directory.open_local(config.checkpoint.local)
    resumed = resumption.find_checkpoint(world, config, directory)
    looked = directory.local is not None and config.run.resume == "auto"
    passed = passed_over(resumed, directory.local)
    restored = restored_from(resumed, directory.last_step, passed) if looked else ""
    with world.agreement():
        task = tasks.load(given, config)
    with world.agreement():
        data = JobData(world, config, task, resumed)
        steps = data.steps(config.train)
    resumption.check_left(world, resumed, config, steps)
    task.config = replace(config, train=replace(config.train, steps=steps, epochs=None))
    compared = task.compared_values, task.compared_files
    facts = compare_task(world, type(task), *compared, data.datasets)
    if resumed:
        resumption.check_same_run(world, resumed, config, data.samples, facts["values"])
    trained = _make_trained(world, config, task, data, resumed=resumed, steps=steps)
    model = trained.model
    best = BestMetric(config.checkpoint.best, config.train.patience)
    last_step = min(config.run.stop_after or steps, steps)
    with world.agreement():
        try_evaluation(task, model, data, trained.precision, best)
        timeline = StepTimeline(world, directory.path, config.log.timeline, steps)
    balancing = _make_balancing(world, data, trained, last_step)
    if config.train.recompute:
        recompute_regions(task.regions(model))
    if config.train.compile:
        compile_regions(task.regions(model))
    objects = _objects(trained, data, best)
    checkpoints = _make_checkpoints(world, config, directory, trained, objects)
    checkpoints.on_checkpoint = task.on_checkpoint
    metrics = _make_metrics(world, config, directory)
    with world.agreement():
        options = to_toml(resumption.with_absolute_paths(config)).encode()
        files = {CONFIG_FILE: options, **task.run_files()}
    directory.when_begun(partial(_write_files, directory.path, files))
    display = Display(world.master, steps, task.items)
    world.output.show_by(display.note, display.warn)
    world.watchdog.at_end.append(lambda *_: display.end())
    done = resumed.manifest.step if resumed else 0
    torch.manual_seed(mixed_seed(config.run.seed, world.rank, done))  # of dropout
    if resumed and "early stopping" not in resumed.manifest.objects:
        objects.pop("early stopping", None)  # it had no patience then
    if resumed and not trained.keeps_scheduler:  # whose state has a rate for each group
        groups = trained.optimizer.state_dict()["param_groups"]
        resumed = resumption.regrouped(resumed, [group["params"] for group in groups])
    # This job's options count, even if the checkpoint was made with others.
    kept = trained.own_options
    checkpoints.resume(
        resumed, objects, kept_options=kept, saves=_saves(config), scored_by=best.text
    )
    return Job(
        config=config,
        directory=directory,
        resumed=resumed,
        restored=restored,
        task=task,
        data=data,
        data_facts=facts,
        steps=steps,
        last_step=last_step,
        trained=trained,
        best=best,
        display=display,
        timeline=timeline,
        balancing=balancing,
        checkpoints=checkpoints,
        metrics=metrics,
    )


def _make_balancing(world: World, data: JobData, trained: Trained, last_step: int) -> StepBalancing:
    """Make the comparison of the ranks' paces. Local."""
    advice = "; --balance.mode throughput would give it a smaller part of each batch"
    return StepBalancing(
        world,
        data.division,
        advice="" if data.division or data.stream else advice,
        last_step=last_step,
        every=trained.sync.every if trained.sync else 1,
    )


def _make_checkpoints(
    world: World,
    config: Config,
    directory: RunDirectory,
    trained: Trained,
    objects: Mapping[str, Stateful],
) -> Checkpoints:
    """Make the checkpoints of the run, as an own loop does. Collective."""
    return world.checkpoints(
        directory.path,
        model=trained.model,
        optimizer=trained.optimizer,
        every=config.checkpoint.every,
        keep=config.checkpoint.keep,
        local=config.checkpoint.local,
        local_every=config.checkpoint.local_every,
        **objects,
    )


def _make_metrics(world: World, config: Config, directory: RunDirectory) -> MetricsLog:
    """Make the metrics of the run, as an own loop does. Collective."""
    log = config.log
    return world.metrics(
        directory.path,
        tensorboard=log.tensorboard,
        wandb=log.wandb,
        mlflow=log.mlflow,
        prometheus=log.prometheus,
        per_rank=log.per_rank,
        report=log.report,
    )


def _objects(trained: Trained, data: JobData, best: BestMetric) -> dict[str, Stateful]:
    """Return what checkpoints hold beside the model and the optimizer, by name."""
    objects: dict[str, Stateful] = {}
    if trained.keeps_scheduler:
        objects["schedule"] = trained.scheduler
    if data.stream:
        objects["data"] = data
    if best.patience:
        objects["early stopping"] = best
    return objects


def _saves(config: Config) -> bool:
    run = config.run
    return config.checkpoint.wanted or run.stop_after is not None or run.max_minutes is not None


def _make_trained(
    world: World,
    config: Config,
    task: tasks.Task,
    data: JobData,
    *,
    resumed: FoundCheckpoint | None,
    steps: int,
) -> Trained:
    """Make the model, and choose what trains it and how nodes exchange. Collective."""
    precision, weights = PRECISIONS[config.train.precision], None
    with world.agreement():
        sync = choose_sync(world, config, weighted=isinstance(data.division, Shares))
        torch.manual_seed(config.run.seed)
        model = tasks.make_model(task).to(world.device, precision.parameters)
        freeze(model, config.init.freeze)
        name, bound = choose_optimizer(task, model, config.optim, world.device)
        if config.train.compile:
            check_compiler(world.device)
    with world.agreement():
        if not resumed and config.init.from_ is not None and world.master:
            weights = load_weights(model, config.init.from_)  # the optimizer spreads them
    optimizer = world.optimizer(
        model,
        bound.func,
        stage=config.zero.stage,
        partition=config.zero.partition,
        max_grad_norm=config.optim.max_grad_norm,
        non_finite=config.optim.non_finite,
        loss_scale=precision.loss_scale,
        sync=sync,
        groups=bound.args[0],
        overlap_forward=True,
        check_every=config.train.check_every,
        **bound.keywords,
    )
    optimizer.clip_each_rank(config.balance.max_rank_grad_norm)
    if sync:
        world.node_collectives  # noqa: B018 - made here, since all ranks make it together
    done = resumed.manifest.step if resumed else 0
    made = list(map(hyperparameters, optimizer.param_groups))
    with world.agreement():
        own = scheduler_of(task, optimizer)
        scheduler = own or options_scheduler(optimizer, config.optim, steps, done)
    groups = list(map(hyperparameters, optimizer.param_groups))
    moved = moved_options(own, groups, made) if own else set()
    options = sorted({key for group in groups for key in group} - moved)
    names = name, f"{type(own).__name__} of the task" if own else config.optim.schedule
    keeps = own is not None
    return Trained(model, optimizer, scheduler, precision, sync, names, keeps, options, weights)


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, content)


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
