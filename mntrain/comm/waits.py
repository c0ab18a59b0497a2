"""The own time of a rank: that without its waits for others, which the engine counts.

On a GPU the host runs ahead of the device, so it is measured on the device's current stream:

    host      queue batch 1 | wait     | queue batch 2 | wait
    device    compute 1            | wait | compute 2      | wait
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mntrain.comm import clock

if TYPE_CHECKING:
    import torch

    from mntrain.comm.engine import ProgressEngine


class Mark(NamedTuple):
    """A point in the work of this rank, and on a device a link to the next wait after it.

    Waits are linked marks, so that those before all marks in use are freed.
    """

    own_s: float  # clock of the host without waits
    at: "torch.cuda.Event | None"  # the same on the device; of a wait, its start
    end: "torch.cuda.Event | None"  # of a wait
    following: "list[Mark]"  # at most one


class _Copier(Protocol):  # a `staging.DeviceCopy`
    def record_time(self) -> "torch.cuda.Event": ...


class OwnClock:
    """A clock that stands still while threads of this rank wait for other ranks. Local.

    `engine` counts the host's waits. `copier` is that of the rank's GPU; None on CPUs.
    """

    def __init__(self, engine: "ProgressEngine", copier: _Copier | None = None) -> None:
        self._engine, self.copier = engine, copier
        self._following: list[Mark] | None = None  # of the last wait; None until the first mark
        self._thread = threading.local()  # its `waits` is True in a wait
        self._lock = threading.Lock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a block that waits for others, on the device. Does not wait for the device.

        A wait inside of another one is part of it.
        """
        if getattr(self._thread, "waits", False):
            yield
            return
        start, self._thread.waits = self._event(), True
        try:
            yield
        finally:
            self._thread.waits = False
            end = self._event()
            with self._lock:
                if start is not None and self._following is not None:
                    wait = Mark(0.0, start, end, [])
                    self._following.append(wait)
                    self._following = wait.following

    def mark(self) -> Mark:
        """Return this point in the work of the calling thread. Does not wait for the device."""
        if self.copier is not None and self._following is None:
            self._following, self._engine.device_waits = [], self.waiting
        own_s = clock.now() - self._engine.waited_s - self._engine.gathered_s
        following = [] if self._following is None else self._following
        return Mark(own_s, self._event(), None, following)

    def own_s(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks without waits for others.

        Waits until the device has come to `end`.
        """
        if start.at is None or end.at is None:
            return end.own_s - start.own_s
        total_ms, following = _elapsed_ms(start.at, end.at), start.following
        while following and following is not end.following:
            wait = following[0]
            assert wait.at is not None
            assert wait.end is not None
            total_ms -= _elapsed_ms(wait.at, wait.end)
            following = wait.following
        return total_ms / 1e3

    def _event(self) -> "torch.cuda.Event | None":
        """Let the device note the time, if anybody has asked for its time."""
        if self.copier is None or self._following is None:
            return None
        return self.copier.record_time()


def _elapsed_ms(start: "torch.cuda.Event", end: "torch.cuda.Event") -> float:
    """Return the time between two events, which may be of different streams, when both are here."""
    start.synchronize()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms
