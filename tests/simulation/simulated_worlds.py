"""Whole worlds on simulated ranks: `mntrain.World` without what belongs to a process.

    SimulatedWorlds([2, 2], seed=7).run(lambda world: world.sum(1.0))

A simulated world has no watchdog and no checks of its host, and leaves the interpreter's hooks. Use
`group_collectives` in place of `node_collectives`: a `cached_property` of Python 3.11 has one lock
for all objects of its class, here for all ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
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
from mntrain.errors import AgreedError

LIBRARY = MpiLibrary("simulated", "serialized", "simulated")


class SimulatedWorld(World):
    """The world of one simulated rank, with the options of `mntrain.init`."""

    def __init__(self, ranks: SimulatedRanks, options: dict[str, Any]) -> None:
        self.ranks = ranks
        super().__init__(**options)

    def compute(self, seconds: float) -> None:
        """Let this rank compute for so long, in virtual time."""
        self.ranks.time.sleep(seconds)

    def _check(self) -> None:
        self.facts, self.findings = [], {}

    def _start_engine(self) -> None:
        engine = self._engine = ProgressEngine()
        engine.main.observer = self.recorder
        self.watchdog: Any = SimpleNamespace(close=lambda: None)
        make_error = partial(AgreedError, rank=self.rank)
        engine.watch = DisagreementWatch(self._comm, engine.streams, make_error)
        self._resources.callback(engine.close)
        self.waits = engine.waits
        self.waits.observe = self.recorder.span


class SimulatedWorlds(SimulatedRanks):
    """Simulated ranks whose programs have a `SimulatedWorld`. `options` are those of it."""

    def __init__(self, *given: Any, options: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(*given, **more)
        self.options = options or {}

    def make_rank(self, number: int) -> Any:
        """Return a world. Called by all ranks together."""
        return SimulatedWorld(self, self.options)

    def take_the_place_of_the_host(self, patch: pytest.MonkeyPatch) -> None:
        """Let worlds use the simulation, and change nothing of this process."""
        super().take_the_place_of_the_host(patch)
        for module in (mntrain.ranks, mntrain.world):
            patch.setattr(module, "call_in_child", lambda method: None)
        for name in ("guard_torch_checkpoints", "warn_of_local_metrics"):
            patch.setattr(mntrain.world, name, lambda *given: nullcontext())
        patch.setattr(mntrain.ranks, "limited_start", lambda *limits: nullcontext())
        patch.setattr(mntrain.ranks, "start_mpi", lambda comm: (self._own_comm(), LIBRARY))
        patch.setattr(mntrain.ranks, "ExceptionWatch", _NoWatch)
        patch.setattr(mpi, "unlink_segments", lambda met: None)

    def _own_comm(self) -> Communicator:
        return Communicator(self.job.comm(current().rank), "world")


class _NoWatch:
    """The place of the hooks for uncaught exceptions."""

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.host = host

    def install(self) -> None:
        """Do nothing."""

    def uninstall(self) -> None:
        """Do nothing."""
