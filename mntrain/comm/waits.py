"""The time in which a rank waits for others, and its own time without that.

On a GPU the host runs ahead of the device, so own time is measured on the device's current stream:

    host      queue batch 1 | wait     | queue batch 2 | wait
    device    compute 1            | wait | compute 2      | wait
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mntrain.comm.device_copy import DeviceCopy


@dataclass(eq=False)
class _DeviceWait:
    """A wait on the device; linked to the next one, so that those before all marks are freed."""

    start: torch.cuda.Event | None = None  # None: the beginning of the list
    end: torch.cuda.Event | None = None
    following: "_DeviceWait | None" = None


class Mark(NamedTuple):
    """A point in the work of this rank: see `Waits.mark`."""

    own_s: float  # clock of the host without waits
    at: torch.cuda.Event | None  # the same on the device
    last: _DeviceWait | None  # before it, on the device


class Waits:
    """The waits of the threads of this rank for other ranks. Local.

    `collectives_s` and `gathers_s` are the host's seconds so far, for tensors and for small
    objects. `copier` is that of the rank's GPU; None on CPUs. Threads that wait at the same time
    count by themselves.
    """

    def __init__(self) -> None:
        self.collectives_s = self.gathers_s = 0.0
        self.copier: DeviceCopy | None = None
        self._last: _DeviceWait | None = None  # None until the first mark on a device
        self._thread = threading.local()  # its `waits` is True in a wait
        self._lock = threading.Lock()

    @contextmanager
    def waiting(self, *, gather: bool = False) -> Iterator[None]:
        """Measure a block that waits for others. Does not wait for the device.

        A wait inside of another one is part of it.
        """
        if getattr(self._thread, "waits", False):
            yield
            return
        began_s, start, self._thread.waits = time.perf_counter(), self._event(), True
        try:
            yield
        finally:
            self._thread.waits = False
            waited_s, end = time.perf_counter() - began_s, self._event()
            with self._lock:
                if gather:
                    self.gathers_s += waited_s
                else:
                    self.collectives_s += waited_s
                if start is not None and self._last is not None:
                    self._last.following = _DeviceWait(start, end)
                    self._last = self._last.following

    def mark(self) -> Mark:
        """Return this point in the work of the calling thread. Does not wait for the device."""
        if self.copier is not None and self._last is None:
            self._last = _DeviceWait()
        own_s = time.perf_counter() - self.collectives_s - self.gathers_s
        return Mark(own_s, self._event(), self._last)

    def own_s(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks without waits for others.

        Waits until the device has come to `end`.
        """
        if start.at is None or end.at is None:
            return end.own_s - start.own_s
        total_ms, wait = _elapsed_ms(start.at, end.at), start.last
        while wait is not None and wait is not end.last:
            wait = wait.following
            if wait is not None and wait.start is not None and wait.end is not None:
                total_ms -= _elapsed_ms(wait.start, wait.end)
        return total_ms / 1e3

    def _event(self) -> torch.cuda.Event | None:
        """Let the device note the time, if anybody has asked for its time."""
        if self.copier is None or self._last is None:
            return None
        return self.copier.record_time()


def _elapsed_ms(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Return the time between two events, which may be of different streams, when both are here."""
    start.synchronize()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms
