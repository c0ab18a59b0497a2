"""The services of a world for a user's own training loop: run directories, checkpoints, metrics."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from mntrain.checkpoint.objects import Stateful
from mntrain.cli import toml_text
from mntrain.config import CheckpointConfig, LogConfig
from mntrain.config_types import construct
from mntrain.equal_values import compare
from mntrain.errors import AgreedError
from mntrain.metrics.files import CONFIG_FILE, write_whole
from mntrain.metrics.writers import expect_installed
from mntrain.ranks import Ranks
from mntrain.run.comparison import compare_config
from mntrain.run.directory import RunDirectory
from mntrain.run.metrics_log import MetricsLog
from mntrain.run.resources import resources
from mntrain.run.saving import Checkpoints, SaveInterval
from mntrain.run.signals import Deadline, StopRequests
from zero.optimizer import ZeroOptimizer


class OwnLoop:
    """The run directories and requests to stop of one world. Made by all ranks.

    `optimizers` are those of the world, which may add to them. Checkpoints and metrics of one run
    share its directory: a line of metrics is written before the checkpoint of its step.
    """

    def __init__(self, world: Ranks, optimizers: Sequence[ZeroOptimizer]) -> None:
        self._world, self._optimizers = world, optimizers
        self._start = time.monotonic()
        self._directories: dict[Path, RunDirectory] = {}
        self._checkpoints: dict[RunDirectory, Checkpoints] = {}
        self._logs: dict[RunDirectory, MetricsLog] = {}
        self._stop: StopRequests | None = None

    def checkpoints(
        self,
        run_dir: str | Path,
        model: nn.Module,
        optimizer: ZeroOptimizer,
        *,
        every: int | str,
        keep: int,
        objects: Mapping[str, Stateful],
    ) -> Checkpoints:
        """Make the checkpoints of a run. Collective. See `World.checkpoints`."""
        given = {"every": str(every), "keep": keep, "the saved objects": sorted(objects)}
        compare(self._world.gather, given, self._world.rank, "give the same on all ranks")
        with self._world.agreement():
            places = {"every": "every", "keep": "keep"}
            checked = construct(CheckpointConfig, {"every": str(every), "keep": keep}, places)
            if not isinstance(optimizer, ZeroOptimizer):
                raise ValueError("optimizer is not one that world.optimizer() has made")
            of_model = set(map(id, model.parameters()))
            if any(id(p) not in of_model for g in optimizer.param_groups for p in g["params"]):
                raise ValueError("optimizer trains parameters that model does not have")
            others = [one for one in self._optimizers if one is not optimizer and not one.closed]
            rare = [other for other in others if other.schedule.replicas > 1]
            if any(id(p) in of_model for o in rare for g in o.param_groups for p in g["params"]):
                raise ValueError(
                    "another optimizer with sync= trains parameters of model, and only those of "
                    "one are averaged for a checkpoint: give it a model of its own, or no sync="
                )
            for name, value in objects.items():
                if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                    raise ValueError(
                        f"{name} is a {type(value).__name__} without state_dict and "
                        "load_state_dict: give objects that have them, or leave it out"
                    )
        directory = self._directory(run_dir)
        self._expect_none(self._checkpoints, directory, "checkpoints")
        made = Checkpoints(
            self._world,
            directory,
            model,
            optimizer,
            interval=SaveInterval(checked.every),
            keep=checked.keep,
            objects=objects,
            flush_metrics=lambda: self._flush(directory),
            optimizers=self._optimizers,
        )
        self._checkpoints[directory] = made
        return made

    def metrics(
        self, run_dir: str | Path, config: Mapping[str, Any] | None, copies: Mapping[str, Any]
    ) -> MetricsLog:
        """Make the metrics of a run. Collective. `copies` are fields of `LogConfig`."""
        compare(self._world.gather, copies, self._world.rank, "give the same on all ranks")
        with self._world.agreement():
            log: LogConfig = construct(LogConfig, copies, dict(zip(copies, copies, strict=True)))
            if self._world.master:
                expect_installed(log, "world.metrics({}=)")
        compare_config(self._world, config)
        directory = self._directory(run_dir)
        self._expect_none(self._logs, directory, "metrics")
        with self._world.agreement():
            if self._world.master and config is not None:
                write_whole(directory.path / CONFIG_FILE, toml_text(config).encode())
        described = partial(self._describe, directory)
        made = MetricsLog(self._world, directory, log, described, self._optimizers)
        self._logs[directory] = made
        return made

    def stop_requested(self, max_minutes: float | None, grace: float) -> bool:
        """Return True if the job is to end, on all ranks. Collective. See `World`."""
        if self._stop is None:
            environment = os.environ if self._world.master else {}
            with self._world.agreement():
                if not (max_minutes is None or isinstance(max_minutes, Real)):
                    raise ValueError(f"max_minutes is {max_minutes!r}: give a number, or None")
                if not (isinstance(grace, Real) and grace > 0):
                    raise ValueError(f"grace is {grace!r}: give seconds above 0")
                deadline = Deadline(max_minutes, environment, self._start)
            self._stop = StopRequests(
                self._world, deadline, self._longest_save_s, grace, self._optimizers
            )
        return self._stop.poll()

    def settle(self) -> None:
        """Write the last lines of metrics, and wait for checkpoints. Collective."""
        for log in self._logs.values():
            with suppress(AgreedError):
                log.flush()
        for checkpoints in self._checkpoints.values():
            checkpoints.settle()

    def close(self) -> None:
        """Restore the handlers of signals, and release the run directories. Local."""
        if self._stop is not None:
            self._stop.close()
        for log in self._logs.values():
            log.abandon()
        for directory in self._directories.values():
            directory.close()

    def _directory(self, run_dir: str | Path) -> RunDirectory:
        """Return the directory of a run, which is locked at the first use. Collective."""
        key = self._world.gather(Path(run_dir).absolute())[0]
        if key not in self._directories:
            made = RunDirectory(self._world, Path(run_dir))
            if not self._directories:
                made.start_recording()
            self._directories[key] = made
        return self._directories[key]

    def _expect_none(
        self, made: Mapping[RunDirectory, object], directory: RunDirectory, what: str
    ) -> None:
        if directory in made:
            raise AgreedError(
                f"{directory.path} has {what} in this world already: use those, or give another "
                "run directory",
                self._world.rank,
            )

    def _flush(self, directory: RunDirectory) -> None:
        """Write the line of metrics of the last step. Collective."""
        if directory in self._logs:
            self._logs[directory].flush()

    def _describe(self, directory: RunDirectory) -> dict[str, Any]:
        """Return the entries of summary.json that are no metrics. Collective."""
        self.settle()
        checkpoints = self._checkpoints.get(directory)
        stop = self._stop
        stopped = stop is not None and stop.status != "running"
        return {
            "status": stop.status if stop and stopped else "completed",
            "reason": stop.reason if stop else None,
            **resources(self._world, self._optimizers),
            **(checkpoints.summary() if checkpoints else {}),
        }

    def _longest_save_s(self) -> float:
        return max((made.longest_save_s for made in self._checkpoints.values()), default=0.0)
