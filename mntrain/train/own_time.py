"""Seconds in which this rank computes, and those of each step in which it does not."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from mntrain.metrics.registry import StepTimer
from mntrain.world import World
from zero.optimizer import ZeroOptimizer

_PHASES = ("data", "forward", "backward")  # in which a rank computes
_ON_DEVICE = "forward and backward"


class OwnInterval(NamedTuple):
    """Samples and own seconds of a rank over several steps."""

    samples: int
    phases: dict[str, float]  # seconds
    waits: tuple[float, ...]  # seconds of each step, from forward to the means of all ranks


class OwnTime:
    """The own time of this rank in a job: loading, forward and backward, without others. Local.

    On a GPU it is the time of the device between the first forward and the end of backward. What is
    left of a step until its gradients are reduced are its waits: for communication, and for ranks
    that compute longer. The first step takes longer, and counts in no interval.
    """

    def __init__(self, world: World, optimizer: ZeroOptimizer) -> None:
        self._world = world
        optimizer.call_after_backward(self._record_end)
        self.samples, self.seconds = 0, 0.0  # of this job
        self._steps = 0  # of this job
        self._samples, self._phases = 0, dict.fromkeys(self._names_of_phases, 0.0)
        self._waits: list[float] = []
        self._start: torch.cuda.Event | None = None  # of computing on the device
        self._end: torch.cuda.Event | None = None
        self._began_s = 0.0  # clock at the first forward of the latest step
        self._reduced_s: float | None = None  # clock when its gradients were reduced
        self._computed_s = 0.0  # by it, without loading

    @property
    def _names_of_phases(self) -> tuple[str, ...]:
        """The phases in which a rank computes; a GPU computes behind those of its host."""
        return ("data", _ON_DEVICE) if self._world.device.type == "cuda" else _PHASES

    @contextmanager
    def computing(self, timer: StepTimer, samples: int) -> Iterator[None]:
        """Measure the forward and backward passes of a step. Does not wait for a device."""
        self.end_step()
        self._steps += 1
        waited_s = self._world.collectives.waited_s
        self._began_s = time.perf_counter()
        self._record_start()
        yield
        waited_s = self._world.collectives.waited_s - waited_s
        if self._start is not None and self._end is None:  # there was no backward
            self._record_end()
        phases = timer.times()
        own = {"data": phases["data"]}
        if self._start is None:
            for_parameters = max(0.0, waited_s - phases["reduce_wait"])
            own |= {
                "forward": phases["forward"] - for_parameters,
                "backward": phases["backward"],
            }
            self._computed_s = own["forward"] + own["backward"]
        self._add(own, samples)

    def reduced(self) -> None:
        """Note that the gradients and means of the step are reduced."""
        self._reduced_s = time.perf_counter()

    def end_step(self) -> None:
        """Add the rest of the latest step, once its device has computed it."""
        if self._start is not None and self._end is not None:
            self._end.synchronize()
            self._computed_s = self._start.elapsed_time(self._end) / 1e3
            self._add({_ON_DEVICE: self._computed_s}, 0)
        self._start = self._end = None
        if self._reduced_s is not None and self._steps > 1:
            step_s = self._reduced_s - self._began_s
            self._waits.append(max(0.0, step_s - self._computed_s))
        self._reduced_s = None

    def take_interval(self) -> OwnInterval:
        """Return what was measured since the last call, the latest step included."""
        self.end_step()
        taken = OwnInterval(self._samples, self._phases, tuple(self._waits))
        self._samples, self._phases = 0, dict.fromkeys(self._names_of_phases, 0.0)
        self._waits = []
        return taken

    def _record_start(self) -> None:
        """Let the device note the time before forward; the end of backward follows."""
        if self._world.device.type == "cuda":
            self._start, self._end = torch.cuda.Event(enable_timing=True), None
            self._start.record()

    def _record_end(self) -> None:
        """Let the device note the time at which gradients are computed."""
        if self._start is not None:
            self._end = torch.cuda.Event(enable_timing=True)
            self._end.record()

    def _add(self, own: Mapping[str, float], samples: int) -> None:
        """Add own seconds of the latest step by phase, and its samples."""
        self.samples += samples
        self.seconds += sum(own.values())
        if self._steps > 1:
            self._samples += samples
            for phase, seconds in own.items():
                self._phases[phase] += seconds
