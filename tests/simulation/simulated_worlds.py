"""Whole worlds on simulated ranks: `mntrain.World` without what belongs to a process.

    SimulatedWorlds([2, 2], seed=7).run(lambda world: world.sum(1.0))

A simulated world has no watchdog and no checks of its host, and leaves the interpreter's hooks.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from simulated_ranks import SimulatedRanks
from virtual_time import current

import mntrain.ranks
import mntrain.world
from mntrain import World
from mntrain.comm import mpi
from mntrain.comm.disagreement import DisagreementWatch
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.mpi import Communicator, MpiLibrary
from mntrain.comm.waits import OwnClock
from mntrain.errors import AgreedError
from mntrain.ranks import Ranks

LIBRARY = MpiLibrary("simulated", "serialized", "simulated")


class _NoWatchdog:
    """The place of the thread that finds hangs and lost ranks, which a deadlock says at once."""

    def __init__(self) -> None:
        self.at_end: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """Return a method that does nothing."""
        return lambda *given, **options: None


def _skip_checks(world: Ranks) -> None:
    world.facts, world.findings = [], {}


def _start_engine(world: Ranks) -> None:
    engine = world._engine = ProgressEngine()
    engine.main.observer = world.recorder
    world.watchdog = _NoWatchdog()  # type: ignore[assignment]
    make_error = partial(AgreedError, rank=world.rank)
    engine.watch = DisagreementWatch(world._comm, engine.streams, make_error)
    world._resources.callback(engine.close)
    world.waits = OwnClock(engine)
    engine.observe = world.recorder.span


class SimulatedWorlds(SimulatedRanks):
    """Simulated ranks whose programs have a `SimulatedWorld`. `options` are those of it."""

    def __init__(self, *given: Any, options: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(*given, **more)
        self.options = options or {}

    def make_rank(self, number: int) -> Any:
        """Return a world. Called by all ranks together."""
        return World(**self.options)

    def take_the_place_of_the_host(self, patch: pytest.MonkeyPatch) -> None:
        """Let worlds use the simulation, and change nothing of this process."""
        super().take_the_place_of_the_host(patch)
        patch.setattr(Ranks, "_check", _skip_checks)
        patch.setattr(Ranks, "_start_engine", _start_engine)
        for name in ("node_collectives", "cross_collectives"):
            # In Python 3.11 it has one lock for all objects of the class, here for all ranks.
            patch.setattr(vars(World)[name], "lock", nullcontext(), raising=False)
        for module in (mntrain.ranks, mntrain.world):
            patch.setattr(module, "call_in_child", lambda method: None)
        for name in ("guard_torch_checkpoints", "warn_of_local_metrics"):
            patch.setattr(mntrain.world, name, lambda *given: None)
        patch.setattr(mntrain.ranks, "limited_start", lambda *limits: nullcontext())
        patch.setattr(mntrain.ranks, "start_mpi", self._start_mpi)
        patch.setattr(mntrain.ranks, "ExceptionWatch", _NoWatch)
        patch.setattr(mpi, "unlink_segments", lambda met: None)

    def _start_mpi(self, comm: Any) -> tuple[Communicator, MpiLibrary]:
        given = self.job.comm(current().rank) if comm is None else comm
        return Communicator(given.Dup(), "world"), LIBRARY


class _NoWatch:
    """The place of the hooks for uncaught exceptions."""

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.host = host

    def end_job(self, error: BaseException) -> None:
        """End the run by the error of a rank that has not closed its world."""
        raise error

    end_run = end_job

    def install(self) -> None:
        """Do nothing."""

    def uninstall(self) -> None:
        """Do nothing."""
