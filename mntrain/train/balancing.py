"""Speeds of the ranks while a job trains: revisions of their shares, and ranks that are slow."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mntrain.data.shares import INTERVAL, BatchNumber, Pace, Shares
from mntrain.metrics.registry import StepTimer
from mntrain.metrics.report import Reporter
from mntrain.train.job_data import JobData
from mntrain.train.stragglers import Straggler, Stragglers
from mntrain.world import World
from zero.optimizer import ZeroOptimizer

_PHASES = ("data", "forward", "backward")  # in which a rank computes
_ON_DEVICE = "forward and backward"


class Balancing:
    """Collects the ranks' speeds every few steps, names slow ranks, and revises the shares.

    A rank's own time is that of loading, forward and backward, without waiting for others: on a GPU
    the time of the device between the first forward and the end of backward. Shares are those of
    `data`, if they may change. `steps` are those of this job.
    """

    def __init__(
        self,
        world: World,
        optimizer: ZeroOptimizer,
        data: JobData,
        reporter: Reporter,
        steps: range,
    ) -> None:
        self._world, self._data, self._reporter = world, data, reporter
        self._end_step = steps.stop
        optimizer.call_after_backward(self._record_end)
        self._shares: Shares | None = data.shares
        self._stragglers = Stragglers(world.size)
        self._total_samples, self._total_s = 0, 0.0  # of this job
        self._steps = 0  # of this job; the first one takes longer, and counts in no speed
        self._samples = 0
        self._phases = dict.fromkeys(self._names_of_phases, 0.0)  # own seconds
        self._start: torch.cuda.Event | None = None  # of computing on the device
        self._end: torch.cuda.Event | None = None
        self._revisions: list[dict[str, Any]] = []
        if data.shares is not None and data.shares.planned:
            counts = data.shares.counts(data.full_batch)
            self._revisions.append({"step": steps.start, "samples": counts})

    @property
    def _names_of_phases(self) -> tuple[str, ...]:
        """The phases in which a rank computes; a GPU computes behind those of its host."""
        return ("data", _ON_DEVICE) if self._world.device.type == "cuda" else _PHASES

    @contextmanager
    def computing(self, step: int, timer: StepTimer) -> Iterator[None]:
        """Measure the forward and backward passes of a step. Local; does not wait for a device."""
        self._note_device_time()
        self._steps += 1
        waited_s = self._world.collectives.waited_s
        self._record_start()
        yield
        waited_s = self._world.collectives.waited_s - waited_s
        if self._start is not None and self._end is None:  # there was no backward
            self._record_end()
        phases, samples = timer.times(), self._data.own_samples(step)
        own = {"data": phases["data"]}
        if self._start is None:
            for_parameters = max(0.0, waited_s - phases["reduce_wait"])
            own |= {
                "forward": phases["forward"] - for_parameters,
                "backward": phases["backward"],
            }
        self._add(own, samples)

    def after_reduction(self, step: int) -> None:
        """Exchange speeds, if that is due after this step. Collective."""
        if self._world.size == 1 or step % INTERVAL:
            return
        self._note_device_time()
        drawn = self._shares.drawn if self._shares else BatchNumber(0, 0)
        pace = Pace(self._samples, sum(self._phases.values()), drawn)
        intervals = self._world.gather((pace, dict(self._phases)))
        self._samples, self._phases = 0, dict.fromkeys(self._names_of_phases, 0.0)
        for straggler in self._stragglers.update(step, intervals):
            self._report(straggler)
        if self._shares is not None:
            self._revise(self._shares, [pace for pace, _ in intervals])

    def by_rank(self) -> list[dict[str, Any]]:
        """Return the samples of each rank in this job, and its own seconds. Collective."""
        self._note_device_time()
        return self._world.gather({"samples": self._total_samples, "own_s": self._total_s})

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json: slow ranks, and the plans of shares. Local."""
        entries: dict[str, Any] = {
            "stragglers": [straggler.to_json() for straggler in self._stragglers.found]
        }
        if self._shares is not None:
            entries["shares"] = self._revisions
        return entries

    def _record_start(self) -> None:
        """Let the device note the time before forward; the end of backward follows. Local."""
        if self._world.device.type == "cuda":
            self._start, self._end = torch.cuda.Event(enable_timing=True), None
            self._start.record()

    def _record_end(self) -> None:
        """Let the device note the time at which gradients are computed. Local."""
        if self._start is not None:
            self._end = torch.cuda.Event(enable_timing=True)
            self._end.record()

    def _note_device_time(self) -> None:
        """Add the time of the last step's computing, once the device has done it. Local."""
        if self._start is not None and self._end is not None:
            self._end.synchronize()
            self._add({_ON_DEVICE: self._start.elapsed_time(self._end) / 1e3}, 0)
        self._start = self._end = None

    def _add(self, own: Mapping[str, float], samples: int) -> None:
        """Add this rank's own seconds of the latest step by phase, and its samples. Local."""
        self._total_samples += samples
        self._total_s += sum(own.values())
        if self._steps > 1:
            self._samples += samples
            for phase, seconds in own.items():
                self._phases[phase] += seconds

    def _revise(self, shares: Shares, paces: list[Pace]) -> None:
        """Revise the shares, and say so. Local; the same on all ranks."""
        samples = self._data.full_batch
        first = shares.revise(paces, samples)
        if first is None or first.batch + 1 >= self._end_step:
            return
        counts = shares.counts(samples)
        self._revisions.append({"step": first.batch + 1, "samples": counts})
        self._reporter.note(
            f"balance: from step {first.batch + 1}, ranks have "
            f"{', '.join(map(str, counts))} of {samples} samples"
        )

    def _report(self, straggler: Straggler) -> None:
        """Warn of a rank that has become slow, or note that it no longer is. Local."""
        place = self._world.places[straggler.rank]
        name = f"rank {straggler.rank} on {place.host}"
        if straggler.until is not None:
            self._reporter.note(f"{name} is no longer slow after step {straggler.until}")
            return
        fix = ""
        if self._shares is None and not self._data.unbalanced:
            fix = "; --balance.mode throughput would give it a smaller part of each batch"
        self._reporter.warn(
            f"since step {straggler.since}, {name} takes {straggler.ratio:.1f} times as long for a "
            f"sample as the other ranks (median), mostly in {straggler.phase}{fix}"
        )
