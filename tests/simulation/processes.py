"""The process of each simulated rank: what it has comes and goes with the rank's turns.

These are modules of tests, which read the number of their rank; what its tests patch; the filters
of warnings; the streams of output; and torch's random numbers.
"""

import importlib.util
import inspect
import os
import signal
import sys
import threading
import time as real_time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import _pytest.monkeypatch
import pytest
import torch
from _pytest.assertion.rewrite import AssertionRewritingHook
from virtual_time import Threading, VirtualTime, in_simulation

ABSENT = _pytest.monkeypatch.NOTSET
PLACES = (
    (sys, "stdout"),
    (sys, "stderr"),
    (warnings, "filters"),
    (warnings, "showwarning"),
    (warnings, "_showwarnmsg_impl"),
)


class Patch(pytest.MonkeyPatch):
    """Patches of one rank, which are there in its turns alone."""

    def __init__(self, process: "Process") -> None:
        super().__init__()
        process.patches.append(weakref.ref(self))
        self._away: list[Any] = []

    def leave(self) -> None:
        """Take the patches away, and keep what they are."""
        self._away = []
        for target, name, before in reversed(self._setattr):
            if inspect.isclass(target) or name in getattr(target, "__dict__", {}):
                self._away.append(target.__dict__.get(name, ABSENT))
            else:
                self._away.append(getattr(target, name, ABSENT))
            _set(target, name, before)
        for target, key, before in reversed(self._setitem):
            self._away.append(target.get(key, ABSENT))
            _put(target, key, before)
        if self._cwd is not None:
            self._away.append(os.getcwd())
            os.chdir(self._cwd)

    def enter(self) -> None:
        """Make the patches again."""
        if self._cwd is not None:
            os.chdir(self._away.pop())
        for target, key, _ in self._setitem:
            _put(target, key, self._away.pop())
        for target, name, _ in self._setattr:
            _set(target, name, self._away.pop())


def _set(target: Any, name: str, value: Any) -> None:
    if value is not ABSENT:
        setattr(target, name, value)
    elif hasattr(target, name):
        delattr(target, name)


def _put(target: Any, key: Any, value: Any) -> None:
    if value is not ABSENT:
        target[key] = value
    else:
        target.pop(key, None)


class Process:
    """The things that one rank has of its own, while another one has its turn."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType | None] = {}
        self.patches: list[weakref.ref[Patch]] = []  # those of earlier tests are gone
        self._values = [getattr(*place) for place in PLACES]
        self._random = torch.get_rng_state()

    def leave(self) -> None:
        """Take it away from the process."""
        for name in self.modules:
            self.modules[name] = sys.modules.pop(name, None)
        patches = self._living()
        self.patches = [weakref.ref(patch) for patch in patches]
        for patch in reversed(patches):
            patch.leave()
        self._values = [getattr(*place) for place in PLACES]
        self._random = torch.get_rng_state()

    def enter(self) -> None:
        """Give it to the process."""
        sys.modules.update({name: made for name, made in self.modules.items() if made})
        for patch in self._living():
            patch.enter()
        for (owner, name), value in zip(PLACES, self._values, strict=True):
            setattr(owner, name, value)
        torch.set_rng_state(self._random)

    def _living(self) -> list[Patch]:
        return [patch for known in self.patches if (patch := known()) is not None]


class Processes:
    """The processes of simulated ranks, which change with their turns.

    `files` are those of modules that each rank has of its own, by name.
    """

    def __init__(self, time: VirtualTime, size: int, files: Mapping[str, Path]) -> None:
        self._all = {None: Process(), **{rank: Process() for rank in range(size)}}
        self._now: int | None = None
        self._handlers = defaultdict[tuple[int | None, int], Any](
            lambda: signal.default_int_handler
        )
        threads = Threading()
        threads.Event = threading.Event  # also for threads of the host
        self._files, self._virtual = files, {"time": _time_of(time), "threading": threads}
        time.change_rank = self.change

    def take_the_place_of_the_host(self, patch: pytest.MonkeyPatch) -> None:
        """Let imports and patches be the running rank's."""

        class OfTheRank(Patch):
            def __init__(own) -> None:  # noqa: N805 - `self` are the processes
                super().__init__(self._all[self._now])

        for module in (pytest, _pytest.monkeypatch):
            patch.setattr(module, "MonkeyPatch", OfTheRank)
        patch.setattr(signal, "signal", self.handle)
        patch.setattr(signal, "getsignal", lambda number: self._handlers[self._now, number])
        self._kill = os.kill
        patch.setattr(os, "kill", self.kill)
        for name in self._files.keys() & sys.modules.keys():
            patch.delitem(sys.modules, name)
        patch.setattr(sys, "meta_path", [self, *sys.meta_path])

    def handle(self, number: int, handler: Any) -> Any:
        """Take the place of `signal.signal` for signals that a rank sends to itself."""
        before = self._handlers[self._now, number]
        self._handlers[self._now, number] = handler
        return before

    def kill(self, process: int, number: int) -> None:
        """Call the rank's handler of a signal, unless that is for a child."""
        if process != os.getpid():
            self._kill(process, number)
            return
        self._handlers[self._now, number](number, None)

    def change(self, rank: int | None) -> None:
        """Give the process to another rank; to none at the end."""
        self._all[self._now].leave()
        self._now = rank
        self._all[rank].enter()

    # A finder and loader of modules.

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name not in self._files or self._now is None:
            return None
        self._all[self._now].modules[name] = None
        return importlib.util.spec_from_file_location(name, self._files[name], loader=self)

    def create_module(self, spec: object) -> None:
        """Leave it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Run a module whose asserts say what they compare, in virtual time."""
        assert module.__spec__ is not None
        hooks = (one for one in sys.meta_path if isinstance(one, AssertionRewritingHook))
        next(hooks).exec_module(module)
        for name, virtual in self._virtual.items():
            if name in vars(module):
                setattr(module, name, virtual)


def _time_of(virtual: VirtualTime) -> SimpleNamespace:
    """Return what takes the place of the module `time` in tests."""
    known = {name: getattr(real_time, name) for name in ("time", "process_time", "thread_time")}

    def sleep(seconds: float) -> None:
        (virtual.sleep if in_simulation() else real_time.sleep)(seconds)

    now = virtual.local_now
    return SimpleNamespace(**known, sleep=sleep, perf_counter=now, monotonic=now)
