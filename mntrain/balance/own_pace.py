"""The speed of this rank in jobs and in own loops, by a clock that stands still while it waits."""

import time
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from mntrain.comm.waits import Mark, OwnClock

INTERVAL = 10  # batches between the collections of speeds


class BatchNumber(NamedTuple):
    """A batch of a pass over a loader; a job has one pass, whose batches are its steps."""

    of_pass: int
    batch: int


class Pace(NamedTuple):
    """Samples and seconds of a rank since the last collection, and the last batch it has drawn."""

    samples: int
    seconds: float
    drawn: BatchNumber
    waits: tuple[float, ...] = ()  # seconds of each step in which it did not compute
    most: int | None = None  # samples of a batch that fit into its memory; None: any
    phases: Mapping[str, float] | None = None  # seconds; in own loops, of one without a name


class _Batch(NamedTuple):
    """A batch that has been computed, perhaps not yet by the device."""

    counts: bool  # the first one takes longer, and counts in no interval
    samples: int
    start: Mark
    end: Mark
    phases: Mapping[str, float]
    rest: str
    step_s: float | None = None  # until all ranks had its result; None: they did not wait


class OwnPace:
    """The samples and the own seconds of this rank by batch. Local.

    On a GPU they are those of its current stream. With `robust`, seconds of an interval follow the
    median batch, since between some batches a loop evaluates or saves.
    """

    def __init__(self, clock: OwnClock, *, robust: bool = False) -> None:
        self._clock, self._robust = clock, robust
        self.samples, self.seconds = 0, 0.0  # of all batches whose time is known
        self._start: Mark | None = None
        self._began_s = 0.0
        self._first = True
        self._pending: list[_Batch] = []  # whose time may not be known yet
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._interval: list[tuple[int, float]] = []  # samples and seconds
        self._phases: dict[str, float] = {}
        self._waits: list[float] = []

    @property
    def running(self) -> bool:
        """True after `begin`, until `end` or `drop`."""
        return self._start is not None

    def begin(self) -> None:
        """Begin a batch. Does not wait for a device, unless many batches have gone by."""
        if len(self._pending) > INTERVAL:
            self.count_pending()
        self._start, self._began_s = self._clock.mark(), time.perf_counter()

    def end(self, samples: int, phases: Mapping[str, float] | None = None, rest: str = "") -> None:
        """End a batch of so many samples. Does not wait for a device.

        `phases` are seconds of the host by phase; what is left is of the phase `rest`.
        """
        if self._start is not None:
            now, counts = self._clock.mark(), not self._first
            self._pending.append(_Batch(counts, samples, self._start, now, phases or {}, rest))
        self._start, self._first = None, False

    def reduced(self) -> None:
        """Note that all ranks have the result of the last batch."""
        step_s = time.perf_counter() - self._began_s
        self._pending[-1] = self._pending[-1]._replace(step_s=step_s)

    def drop(self) -> None:
        """Forget all marks: a clock keeps what follows one."""
        self._start = None
        self._pending.clear()

    def take(self, drawn: BatchNumber, most: int | None = None) -> Pace:
        """Return the pace since the last call. Waits for the device."""
        self.count_pending()
        samples = sum(own for own, _ in self._interval)
        seconds = sum(own_s for _, own_s in self._interval)
        if self._robust and samples:
            seconds = samples * median(own_s / own for own, own_s in self._interval if own)
        pace = Pace(samples, seconds, drawn, tuple(self._waits), most, self._phases)
        self._begin_interval()
        return pace

    def count_pending(self) -> None:
        """Add up the batches of which the time was not known. Waits for the device."""
        for batch in self._pending:
            own_s = self._clock.own_s(batch.start, batch.end)
            self.samples += batch.samples
            self.seconds += own_s
            if not batch.counts:
                continue
            self._interval.append((batch.samples, own_s))
            phases = {**batch.phases, batch.rest: max(0.0, own_s - sum(batch.phases.values()))}
            for phase, phase_s in phases.items():
                self._phases[phase] = self._phases.get(phase, 0.0) + phase_s
            if batch.step_s is not None:
                self._waits.append(max(0.0, batch.step_s - own_s))
        self._pending.clear()
