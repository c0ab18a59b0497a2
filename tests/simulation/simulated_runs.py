"""Runs of simulated worlds with checkpoints in real folders, which end at any moment.

    runs = SimulatedRuns([4], seed=7, options={"ranks_per_node": 2})
    runs.kill(when=1e-3)
    runs.run(program)

Files are written by simulated threads, which take a time that the seed decides, so that a kill
finds them half written. Copies on a partner's node come through this process, if both nodes live.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_worlds import SimulatedWorlds
from virtual_time import Flag, Thread, current

import mntrain.run.directory
from mntrain.checkpoint import format as checkpoint_format
from mntrain.checkpoint import local_saver, node_folders, partner_copies, saver
from mntrain.checkpoint.format import FILES, ChecksummedRange
from mntrain.checkpoint.partner_copies import partner_nodes
from mntrain.ranks import Ranks

DISK_S = 2e-4  # of virtual time, on average, for each step of writing


class Later:
    """The future of a simulated thread, with the interface of `concurrent.futures.Future`."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self._ended = function, Flag()
        self._value: Any = None
        self._error: BaseException | None = None
        Thread(self._run, "mntrain checkpoint").start()

    def done(self) -> bool:
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Any:
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            disk()
            self._value = self._function()
        except Exception as error:
            self._error = error
        self._ended.set()


def disk() -> None:
    """Let the running thread wait for the disk."""
    time = current().time
    time.sleep(time.random.expovariate(1 / DISK_S))


def _slow(function: Callable[..., None], *given: Any) -> None:
    disk()
    function(*given)


class Copies:
    """Copies of what ranks write, on the nodes of their partners."""

    roots: dict[int, Path]  # by node, of the running simulation

    def __init__(self, world: Ranks, root: Path) -> None:
        self._node, self._own = world.topology.node(world.rank), root
        self.until = 0.0  # of the real time, when a copy is to be sent
        nodes = world.topology.nodes
        self.roots[self._node] = root
        self.partner = partner_nodes([""] * len(nodes))[self._node] if len(nodes) > 1 else None

    def send(
        self,
        step: Path,
        sizes: Mapping[str, int],
        ranges: Mapping[str, Sequence[ChecksummedRange]],
        node: int | None = None,
        folder: Path | None = None,
    ) -> str:
        node = self.partner if node is None else node
        for name in FILES if node is not None else ():
            disk()
            data = ((folder or self._own) / step / name).read_bytes()
            sent = BytesIO(b"".join(data[part.start :][: part.length] for part in ranges[name]))
            own: Any = SimpleNamespace(
                recv_into=lambda buffer, most, sent=sent: sent.readinto(buffer[:most])
            )
            path = self.roots[node] / step / name
            partner_copies._write_ranges(own, path, sizes[name], ranges[name])
        return ""

    def close(self) -> None:
        """Do nothing."""


class SimulatedRuns(SimulatedWorlds):
    """Simulated worlds with checkpoints, all of which may be killed at once."""

    def kill(self, when: float) -> None:
        """Let all ranks vanish after so many seconds of virtual time."""

        def act() -> None:
            for rank in range(self.size):
                self.time.lose(rank)

        self.time.at(when, act)

    def take_the_place_of_the_host(self, patch: pytest.MonkeyPatch) -> None:
        super().take_the_place_of_the_host(patch)
        slow = {name: partial(_slow, getattr(os, name)) for name in ("fsync", "ftruncate")}
        system = SimpleNamespace(**{**vars(os), **slow})
        for module in (saver, checkpoint_format):
            patch.setattr(module, "os", system)
        at_exit = SimpleNamespace(
            register=lambda *given, **more: None, unregister=lambda call: None
        )
        patch.setattr(saver, "atexit", at_exit)
        for module in (saver, local_saver):
            patch.setattr(module, "in_thread", Later)
        patch.setattr(node_folders, "PartnerCopies", Copies)
        patch.setattr(Copies, "roots", {}, raising=False)
        lock = SimpleNamespace(replaced=str, close=lambda: None)
        directory = mntrain.run.directory
        patch.setattr(directory, "RunLock", lambda path, on_lost: lock)
        patch.setattr(directory.RunDirectory, "_start_recording", lambda own: None)
