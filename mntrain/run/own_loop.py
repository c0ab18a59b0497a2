"""The services of a world for a training loop: run directories, checkpoints, metrics, requests."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import count
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from mntrain.alike.compared_options import compare_config
from mntrain.alike.values import compare
from mntrain.checkpoint import Saved
from mntrain.checkpoint.objects import HOOK, UNNAMED
from mntrain.data.loader import ShardRegistry
from mntrain.errors import AgreedError
from mntrain.metrics.copies import expect_installed
from mntrain.metrics.files import CONFIG_FILE
from mntrain.metrics.registry import METRICS
from mntrain.options.command_line import toml_text
from mntrain.options.config import CheckpointConfig, LogConfig
from mntrain.options.types import construct
from mntrain.ranks import Ranks
from mntrain.run.delayed_sums import DelayedSums
from mntrain.run.directory import RunDirectory
from mntrain.run.final_report import final_lines
from mntrain.run.job_resources import resources
from mntrain.run.metrics_log import MetricsLog
from mntrain.run.saving import Checkpoints
from mntrain.run.signals import Deadline, Stop, StopRequests
from zero.optimizer import ZeroOptimizer

_TWO_AVERAGES = (
    "another optimizer with sync= trains parameters of model, and only those of one are averaged "
    "for a checkpoint: give it a model of its own, or no sync="
)


class OwnLoop:
    """The run directories and requests to stop of one world. Made by all ranks.

    `optimizers` are those of the world, which may add to them, and `shards` have counted the
    samples. Checkpoints and metrics of one run share its directory: a line of metrics is written
    before the checkpoint of its step. Nothing is written before the run begins: with the `restore`
    of its checkpoints, or where `metrics` are made without any.
    """

    def __init__(
        self, world: Ranks, optimizers: Sequence[ZeroOptimizer], shards: ShardRegistry
    ) -> None:
        self._world, self._optimizers, self._shards = world, optimizers, shards
        self._start = time.monotonic()
        self._directories: dict[Path, RunDirectory] = {}
        self._checkpoints: dict[RunDirectory, Checkpoints] = {}
        self._logs: dict[RunDirectory, MetricsLog] = {}
        self._requests: StopRequests | None = None
        self._sums_made = count(1)

    def checkpoints(
        self, run_dir: str | Path, saved: Saved, options: Mapping[str, Any]
    ) -> Checkpoints:
        """Make the checkpoints of a run. Collective. See `World.checkpoints`.

        `options` are fields of `CheckpointConfig`.
        """
        world = self._world
        given = {**options, "the saved objects": sorted(saved.objects)}
        compare(world, given, "give the same on all ranks")
        with world.agreement():
            _check_named(run_dir)
            checked = construct(CheckpointConfig, options, {name: name for name in options})
            self._check_saved(saved)
        directory = self._unused(run_dir, self._checkpoints, "checkpoints")

        def flush_metrics() -> None:
            if log := self._logs.get(directory):
                log.flush()

        directory.open_local(checked.local)
        self._checkpoints[directory] = made = Checkpoints(
            world,
            directory,
            saved,
            checked,
            self._sums("checkpoints"),
            before_save=flush_metrics,
            uninterrupted=self._uninterrupted,
        )
        return made

    def _check_saved(self, saved: Saved) -> None:
        """Raise ValueError for what cannot be saved together. Local."""
        model, optimizer = saved.model, saved.optimizer
        if not isinstance(optimizer, ZeroOptimizer):
            raise ValueError("optimizer is not one that world.optimizer() has made")
        of_model = set(map(id, model.parameters()))
        if not _trained(optimizer) <= of_model:
            raise ValueError("optimizer trains parameters that model does not have")
        for other in self._optimizers:
            rare = other is not optimizer and not other.closed and other.sync_schedule.replicas > 1
            if rare and _trained(other) & of_model:
                raise ValueError(_TWO_AVERAGES)
        for name, value in saved.objects.items():
            if name in (HOOK, UNNAMED):
                raise ValueError(f"checkpoints have {name} anyway: give the object another name")
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ValueError(
                    f"{name} is a {type(value).__name__} without state_dict and load_state_dict: "
                    "give objects that have them, or leave it out"
                )
            if isinstance(value, ZeroOptimizer) and value.sharded:
                raise ValueError(
                    f"{name} is another optimizer whose state is sharded, and a checkpoint has one "
                    f"such state, that of optimizer=: save {name}.full_state_dict(), which all "
                    "ranks call, with torch.save"
                )

    def check_exchanged(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise ValueError for parameters of checkpoints, which nodes may not exchange. Local.

        They are those that a new optimizer trains, which closes others that have trained any.
        """
        trained = set(map(id, parameters))
        for model, optimizer, _ in (one.saved for one in self._checkpoints.values()):
            replaced = optimizer.closed or trained & _trained(optimizer)
            if not replaced and trained & set(map(id, model.parameters())):
                raise ValueError(_TWO_AVERAGES)

    def metrics(
        self, run_dir: str | Path, config: Mapping[str, Any] | None, copies: Mapping[str, Any]
    ) -> MetricsLog:
        """Make the metrics of a run. Collective. `copies` are fields of `LogConfig`."""
        world = self._world
        compare(world, copies, "give the same on all ranks")
        with world.agreement():
            _check_named(run_dir)
            log: LogConfig = construct(LogConfig, copies, {name: name for name in copies})
            if world.master:
                expect_installed(log, "world.metrics({}=)")
            if not (config is None or isinstance(config, Mapping)):
                kind = type(config).__name__
                raise ValueError(f"config is of type {kind}: give a mapping, such as vars(args)")
        compare_config(world, config)
        with world.agreement():
            text = None if config is None else toml_text(config).encode()
        directory = self._unused(run_dir, self._logs, "metrics")
        directory.write_files({} if text is None else {CONFIG_FILE: text})
        summarize = partial(self._summarize, directory)
        self._logs[directory] = made = MetricsLog(
            world, directory, log, self._sums("metrics"), summarize
        )
        if directory not in self._checkpoints:
            directory.begin()
        return made

    def stop_requested(
        self, max_minutes: float | None, grace: float, reason: str | None
    ) -> Stop | None:
        """Return the request to end the job, if any. Collective. See `World`."""
        if not (reason is None or isinstance(reason, str)):
            raise ValueError(f"reason is {reason!r}: give a text, or None to ask for nothing")
        if self._requests is None:
            environment = os.environ if self._world.master else {}
            with self._world.agreement():
                if not (max_minutes is None or isinstance(max_minutes, Real)):
                    raise ValueError(f"max_minutes is {max_minutes!r}: give a number, or None")
                if not (isinstance(grace, Real) and grace > 0):
                    raise ValueError(f"grace is {grace!r}: give seconds above 0")
                deadline = Deadline(max_minutes, environment, self._start)
            self._requests = StopRequests(
                self._world, deadline, grace, self._sums("requests"), self._longest_save_s
            )
        return self._requests.poll(reason)

    def _sums(self, name: str) -> DelayedSums:
        """Return sums over all ranks that travel with the gradients of the loop's steps.

        Local, in the same order on all ranks: for services that act on all ranks after the same
        step. Ranks compare how many values they start, but not the names of these.
        """
        collectives = self._world.collectives
        return DelayedSums(collectives, f"{name} {next(self._sums_made)}", self._latest_optimizer)

    def _latest_optimizer(self) -> ZeroOptimizer | None:
        """Return the optimizer with most steps. Local."""
        optimizers = [one for one in self._optimizers if not one.closed]
        return max(optimizers, key=lambda one: one.accumulation.steps, default=None)

    def _longest_save_s(self) -> float:
        """Return the most seconds that a checkpoint has taken from the copy to the disk. Local."""
        return max((one.longest_s for one in self._checkpoints.values()), default=0.0)

    def _uninterrupted(self) -> AbstractContextManager[None]:
        """Return the context of a save, in which no signal ends the process. Local."""
        return self._requests.saving() if self._requests else nullcontext()

    def flush(self) -> None:
        """Write the last lines of metrics, and wait for checkpoints. Collective."""
        for log in self._logs.values():
            with suppress(AgreedError):
                log.flush()
        for checkpoints in self._checkpoints.values():
            checkpoints.wait()

    def end_local(self) -> None:
        """End checkpoints in the nodes' memory, at an end without an error. Collective."""
        for checkpoints in self._checkpoints.values():
            checkpoints.end_local(in_order=True)

    def close(self) -> None:
        """Restore the handlers of signals, and release the run directories. Local."""
        for checkpoints in self._checkpoints.values():
            checkpoints.end_local(in_order=False)
        if self._requests is not None:
            self._requests.close()
        for log in self._logs.values():
            log.abandon()
        for directory in self._directories.values():
            directory.close()

    def directory(self, run_dir: Path | None, recorder: Path | None = None) -> RunDirectory:
        """Return the directory of a run, which is locked at the first use. Collective.

        As `RunDirectory`. Raises AgreedError if another job uses it.
        """
        key = self._world.gather(run_dir and run_dir.absolute())[0]
        known = self._directories.get(key) if key else None
        if known is None or known.closed:
            known = RunDirectory(self._world, run_dir, recorder)
            self._directories[known.path.absolute()] = known
        return known

    def _unused(
        self, run_dir: str | Path, users: Mapping[RunDirectory, object], what: str
    ) -> RunDirectory:
        """Return a `directory` that is not among those of `users`, or raise AgreedError."""
        directory = self.directory(Path(run_dir))
        if directory in users:
            raise AgreedError(
                f"{run_dir} has {what} in this world already: use those, or give another run "
                "directory",
                self._world.rank,
            )
        return directory

    def report(self) -> dict[str, Any]:
        """Print the final report on the master, and return its figures. Collective."""
        wall_s = self._world.gather(time.monotonic() - self._start)[0]
        figures = {
            "steps": max((one.accumulation.steps for one in self._optimizers), default=0),
            "wall_s": wall_s,
            **self._resources(wall_s),
        }
        self._world.print("\n".join(final_lines(figures)))
        return figures

    def _summarize(
        self, directory: RunDirectory, values: Mapping[str, Any], wall_s: float, **figures: float
    ) -> dict[str, Any]:
        """Return the entries of summary.json, of the last values of metrics. Collective."""
        self.flush()
        checkpoints = self._checkpoints.get(directory)
        stop = (self._requests.stop if self._requests else None) or Stop("completed", None)
        return {
            **stop._asdict(),
            "steps": directory.last_step,
            **{m.summary: values.get(name) for name, m in METRICS.items() if m.summary},
            "wall_s": wall_s,
            "run_dir": str(directory.path),
            **self._resources(wall_s, **figures),
            **(checkpoints.summary() if checkpoints else {}),
        }

    def _resources(self, wall_s: float, **figures: float) -> dict[str, Any]:
        own = {"samples": self._shards.samples, **figures}
        return resources(self._world, self._optimizers, own, wall_s)


def _check_named(run_dir: str | Path) -> None:
    """Raise ValueError for an empty name of a run directory, which Path takes for this folder."""
    if run_dir == "":
        raise ValueError('run_dir is "": give the folder of a run, or "." for this one')


def _trained(optimizer: ZeroOptimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer trains."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
