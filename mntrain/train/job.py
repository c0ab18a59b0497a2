"""The objects of a training job, which its options describe: data, model, optimizer, services."""

import os
from dataclasses import asdict, replace

from mntrain import tasks
from mntrain.alike.compared_task import compare_task
from mntrain.balance.shares import Shares
from mntrain.checkpoint import Stateful
from mntrain.data.balancing import StepBalancing
from mntrain.data.randomness import mixed_seed, seed_process
from mntrain.errors import AgreedError
from mntrain.metrics.copies import expect_installed
from mntrain.metrics.display import Display
from mntrain.options.config import Config
from mntrain.options.types import as_mapping
from mntrain.output import print_warning
from mntrain.recorder.launch_notes import LaunchNotes
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
from mntrain.train.optimization import (
    choose_optimizer,
    moved_options,
    options_scheduler,
    scheduler_of,
)
from mntrain.world import World
from zero.layout import split
from zero.param_groups import hyperparameters


class Job:
    """The objects of a job, made and checked before any work starts. Made by all ranks.

    They begin its run or resume it. `given` is the task, if not that of the options. Raises
    AgreedError for bad input, before anything is written into the run directory.
    """

    def __init__(self, world: World, config: Config, given: tasks.Given | None = None) -> None:
        with world.agreement():
            if world.master:
                expect_installed(config.log)
                warn_of_launch(config)
        self.config = config
        self.saved_config = resumption.to_json(config)
        """The options, as checkpoints have them."""
        self.directory = world.own_loop.directory(config.run.dir, config.run.recorder)
        try:
            self._set_up(world, config.task if given is None else given)
        except AgreedError:
            self.directory.close()
            raise

    def _set_up(self, world: World, given: tasks.Given) -> None:
        config, directory = self.config, self.directory
        directory.open_local(config.checkpoint.local)
        self.resumed = resumed = resumption.find_checkpoint(world, config, directory)
        self.done = resumed.manifest.step if resumed else 0
        """The steps before this job."""
        with world.agreement():
            seed_process(config.run.seed)
            self.task = task = tasks.load(given, config)
        with world.agreement():
            self.data = data = JobData(world, config, task, resumed)
            self.steps = steps = data.steps(config.train)
            """The steps of the run."""
        resumption.check_left(world, resumed, config, steps)
        task.config = replace(config, train=replace(config.train, steps=steps, epochs=None))
        compared = task.compared_values, task.compared_files
        self.data_facts = facts = compare_task(world, type(task), *compared, data.datasets)
        """What a resumed run compares of the data."""
        if resumed:
            resumption.check_same_run(world, resumed, config, data.samples, facts["values"])
        self._make_trained(world)
        model = self.model
        self.best = best = BestMetric(config.checkpoint.best, config.train.patience)
        self.last_step = min(config.run.stop_after or steps, steps)
        """The last step of this job, unless it ends early."""
        with world.agreement():
            try_evaluation(task, model, data, self.precision, best)
            self.timeline = StepTimeline(world, directory.path, config.log.timeline, steps)
        advice = "; --balance.mode throughput would give it a smaller part of each batch"
        self.balancing = StepBalancing(
            world,
            data.division,
            advice="" if data.division or data.stream else advice,
            last_step=self.last_step,
            every=self.sync.every if self.sync else 1,
        )
        if config.train.recompute:
            recompute_regions(task.regions(model))
        if config.train.compile:
            compile_regions(task.regions(model))
        self._open_run(world)

    def _make_trained(self, world: World) -> None:
        """Make the model, and what trains it and says how nodes exchange. Collective."""
        config, task, data, done = self.config, self.task, self.data, self.done
        self.precision = precision = PRECISIONS[config.train.precision]
        self.weights: tuple[str, list[str]] | None = None
        """The weights that were loaded, and what of them does not fit."""
        with world.agreement():
            self.sync = choose_sync(world, config, weighted=isinstance(data.division, Shares))
            """How nodes exchange; None: every step is synchronous."""
            seed_process(config.run.seed)
            with tasks.errors_of_task(task, "model() fails"):
                self.model = model = task.model()
            model.to(world.device, precision.parameters)
            freeze(model, config.init.freeze)
            name, bound = choose_optimizer(task, model, config.optim, world.device)
            if config.train.compile:
                check_compiler(world.device)
        with world.agreement():
            if not done and config.init.from_ is not None and world.master:
                self.weights = load_weights(model, config.init.from_)  # the optimizer spreads them
        self.optimizer = optimizer = world.optimizer(
            model,
            bound.func,
            stage=config.zero.stage,
            partition=config.zero.partition,
            max_grad_norm=config.optim.max_grad_norm,
            non_finite=config.optim.non_finite,
            loss_scale=precision.loss_scale,
            sync=self.sync,
            groups=bound.args[0],
            overlap_forward=True,
            check_every=config.train.check_every,
            **bound.keywords,
        )
        optimizer.clip_each_rank(config.balance.max_rank_grad_norm)
        if self.sync:
            world.node_collectives  # noqa: B018 - made here, since all ranks make it together
        made = list(map(hyperparameters, optimizer.param_groups))
        with world.agreement():
            own = scheduler_of(task, optimizer)
            self.scheduler = own or options_scheduler(optimizer, config.optim, self.steps, done)
        groups = list(map(hyperparameters, optimizer.param_groups))
        moved = moved_options(own, groups, made) if own else set()
        self.keeps_scheduler = own is not None
        """True if the scheduler is the task's, whose state checkpoints hold."""
        self.own_options = sorted({key for group in groups for key in group} - moved)
        """Options of the groups: all but those that a scheduler with a state sets."""
        self.names = name, f"{type(own).__name__} of the task" if own else config.optim.schedule
        """Of the optimizer and the scheduler."""

    def _open_run(self, world: World) -> None:
        """Open the files of the run, and begin it or resume it. Collective."""
        config, directory, task = self.config, self.directory, self.task
        resumed, objects = self.resumed, self._objects()
        options, copies = {**asdict(config.checkpoint), **objects}, asdict(config.log)
        del options["best"], copies["timeline"]
        self.checkpoints = world.checkpoints(
            directory.path, model=self.model, optimizer=self.optimizer, **options
        )
        self.checkpoints.on_checkpoint = task.on_checkpoint
        written = as_mapping(resumption.with_absolute_paths(config))
        del written["config"]
        self.metrics = world.metrics(directory.path, written, **copies)
        with world.agreement():
            files = task.run_files()
        directory.write_files(files)
        self.display = display = Display(world.master, self.steps, task.items)
        world.output.show_by(display.note, display.warn)
        world.watchdog.at_end.append(lambda *_: display.end())
        seed_process(mixed_seed(config.run.seed, world.rank, self.done))  # of dropout
        if resumed and "early stopping" not in resumed.manifest.objects:
            objects.pop("early stopping", None)  # it had no patience then
        if resumed and not self.keeps_scheduler:  # whose state has a rate for each group
            groups = self.optimizer.state_dict()["param_groups"]
            resumed = resumption.regrouped(resumed, [group["params"] for group in groups])
        # This job's options count, even if the checkpoint was made with others.
        self.checkpoints.resume(
            resumed,
            objects,
            kept_options=self.own_options,
            saves=self.saves,
            scored_by=self.best.text,
        )

    def _objects(self) -> dict[str, Stateful]:
        """Return what checkpoints hold beside the model and the optimizer, by name."""
        objects: dict[str, Stateful] = {}
        if self.keeps_scheduler:
            objects["schedule"] = self.scheduler
        if self.data.stream:
            objects["data"] = self.data
        if self.best.patience:
            objects["early stopping"] = self.best
        return objects

    @property
    def saves(self) -> bool:
        """True if the job leaves a checkpoint at its end in any case."""
        config = self.config
        ends = config.run.stop_after is not None or config.run.max_minutes is not None
        return config.checkpoint.wanted or ends

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation follows a step. Local."""
        every = self.config.train.eval_every
        due = step == self.steps or (every > 0 and step % every == 0)
        return due and bool(self.data.validation_sets)


def warn_of_launch(config: Config) -> None:
    """Warn of a job that `mntrain launch` cannot start again. Local."""
    lasts = config.run.dir is not None and config.checkpoint.wanted
    if LaunchNotes.of(os.environ) is not None and not lasts:
        print_warning(
            "mntrain launch cannot resume this job after a loss: give --run.dir and "
            "--checkpoint.every, such as --run.dir runs/a --checkpoint.every auto"
        )


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
