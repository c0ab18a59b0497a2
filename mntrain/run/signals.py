"""Reasons to end a job early: signals, and the end of its time.

Signals are only noted by their handlers. All ranks act on them together, after the same step.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from types import FrameType
from typing import NamedTuple

from mntrain.ranks import Ranks
from mntrain.run.allocation import allocation_end
from mntrain.run.delayed_sums import DelayedSums

# SIGINT: a user at a terminal ends the job; Open MPI's mpirun turns it into SIGTERM for its ranks.
INTERRUPT = signal.SIGINT
# A scheduler wants the node back: SIGTERM before it kills, SIGUSR1 or SIGUSR2 if a script asks so.
PREEMPT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

REQUESTS = ("stopped", "preempted", "interrupted")  # the first of several counts

# Spare time for what steps and saves have not shown yet: a fraction of the job's time, up to a
# maximum; in an allocation at least _MIN_ALLOCATION_SPARE_S, since its end kills every process.
_SPARE_FRACTION = 0.05
_MAX_SPARE_S = 30.0
_MIN_ALLOCATION_SPARE_S = 5.0


class Deadline:
    """The end of a job's time: `max_minutes` from its start, or the end of its batch job.

    The earlier one counts, on the monotonic clock, which shows `start` (by default now).
    `environment` is that of the process.
    """

    def __init__(
        self,
        max_minutes: float | None,
        environment: Mapping[str, str],
        start: float | None = None,
    ) -> None:
        left, least_spare_s, self.reason = math.inf, 0.0, ""
        if max_minutes is not None:
            passed = 0.0 if start is None else time.monotonic() - start
            left, self.reason = 60 * max_minutes - passed, f"its {max_minutes:g} minutes are over"
        end = allocation_end(environment)
        if end is not None and end - time.time() < left:
            left, least_spare_s = end - time.time(), _MIN_ALLOCATION_SPARE_S
            self.reason = f"the allocation ends {datetime.fromtimestamp(end)}"
        self.at = time.monotonic() + left
        self._spare_s = max(least_spare_s, min(_MAX_SPARE_S, _SPARE_FRACTION * left))

    def near(self, step_s: float, save_s: float) -> bool:
        """Return True if it is time to save and end, given the duration of a step and a save."""
        return self.at - time.monotonic() < 2 * (step_s + save_s) + self._spare_s


class Stop(NamedTuple):
    """The early end of a job, the same on all ranks."""

    status: str
    """Source of the request: "stopped" (of a rank's own code), "preempted" or "interrupted"."""
    reason: str | None  # such as "SIGTERM on rank 1"


class StopRequests:
    """Requests to end a job, as `World.stop_requested` has them. Ranks act on them together.

    From the start until `close`, it notes the first signal that arrives. A second SIGINT raises
    KeyboardInterrupt, except inside `saving`. A job whose ranks do not agree within `grace_s`
    seconds after the first signal is ended, and with several ranks, at the second signal. Only the
    master's deadline counts, since clocks of nodes may differ.

    `stop` is the request on which they have agreed, by `sums`, its own. `longest_save_s` returns
    the most seconds that a checkpoint has taken.
    """

    def __init__(
        self,
        world: Ranks,
        deadline: Deadline,
        grace_s: float,
        sums: DelayedSums,
        longest_save_s: Callable[[], float],
    ) -> None:
        self.stop: Stop | None = None
        self._world, self._deadline, self._grace_s = world, deadline, grace_s
        self._watchdog, self._on_signal = world.watchdog, world.recorder.signal_arrived
        self._first: signal.Signals | None = None
        self._second_interrupts = True
        self._deferred = False
        self._process = os.getpid()
        self._sums, self._longest_save_s = sums, longest_save_s
        self._longest_step_s = 0.0
        self._step_began: float | None = None  # at the last poll
        self._asked: str | None = None  # why, by this rank's code
        self._previous_handlers = {
            number: signal.signal(number, self._note) for number in (INTERRUPT, *PREEMPT)
        }
        self._limit()

    def _limit(self) -> None:
        """Let the watchdog end the job if ranks do not agree on a signal that comes. Local."""
        if self._watchdog.expect_signals((INTERRUPT, *PREEMPT), self._grace_s):
            self._second_interrupts = self._watchdog.alone

    def _end_limit(self) -> None:
        """Note that all ranks go on together, whatever signal comes. Local."""
        self._watchdog.ignore_signals()
        self._second_interrupts = True

    def close(self) -> None:
        """Restore the handlers of signals. Local."""
        self._end_limit()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context in which no signal ends the process, since all ranks save. Local."""
        self._deferred = True
        self._end_limit()
        try:
            yield
        finally:
            self._deferred = False
            if self.stop is None:
                self._limit()

    def poll(self, reason: str | None = None) -> Stop | None:
        """Return the request to end that all ranks know of, if any. Collective, once a step.

        Requests count from the poll on that follows what all ranks send next. With a `reason` this
        rank asks all of them to stop.
        """
        self._asked = reason or self._asked
        now, began = time.monotonic(), self._step_began
        self._longest_step_s = max(self._longest_step_s, now - (began or now))
        self._step_began = now
        if self.stop is None:
            sums = [found.sums for found in self._sums.take()]
            # The first that a rank has counts.
            asked = [name for one in sums for name in REQUESTS if one[name]]
            if asked:
                self._end_limit()
                self.stop = Stop(asked[0], self._find_reason(asked[0]))
            elif not self._sums.waiting:
                self._sums.start({name: partial(self._asks, name) for name in REQUESTS})
        return self.stop

    def _asks(self, request: str) -> bool:
        """Return whether this rank has a request, when it is sent to all."""
        if request == "stopped":
            return self._asked is not None
        if request == "interrupted":
            return self._first == INTERRUPT
        step_s = self._longest_step_s * self._sums.delay
        return self._first in PREEMPT or self._deadline.near(step_s, self._longest_save_s())

    def _find_reason(self, status: str) -> str:
        """Return which request ends the job early, and whose. Collective."""
        if status == "stopped":
            return next(filter(None, self._world.gather(self._asked)))
        first = self._first
        for rank, name in enumerate(self._world.gather(first.name if first else None)):
            if name:
                return f"{name} on rank {rank}"
        return self._world.gather(self._deadline.reason)[0]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, which ends as if this had no handlers
            signal.signal(number, self._previous_handlers[signal.Signals(number)])
            os.kill(os.getpid(), number)
            return
        self._on_signal(number)
        second = self._first == number == INTERRUPT and self._second_interrupts
        if second and not self._deferred:
            raise KeyboardInterrupt
        self._first = self._first or signal.Signals(number)
