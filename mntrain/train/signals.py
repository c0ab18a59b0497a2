"""Reasons to end a job early: signals, and the end of its time.

Signals are only noted by their handlers. All ranks act on them together at the end of a step.
"""

import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any, Self

# SIGINT: a user at a terminal ends the job; Open MPI's mpirun turns it into SIGTERM for its ranks.
INTERRUPT = signal.SIGINT
# A scheduler wants the node back: SIGTERM before it kills, SIGUSR1 or SIGUSR2 if a script asks so.
PREEMPT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

# Spare time for what steps and saves have not shown yet: a fraction of the job's time, up to a
# maximum; in an allocation at least _MIN_ALLOCATION_SPARE_S, since its end kills every process.
_SPARE_FRACTION = 0.05
_MAX_SPARE_S = 30.0
_MIN_ALLOCATION_SPARE_S = 5.0
_SCONTROL_TIMEOUT_S = 10.0


class SignalRequests:
    """Notes the first signal that arrives while it is entered.

    A second SIGINT raises KeyboardInterrupt, except inside `deferred`.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._deferred = False

    @property
    def interrupted(self) -> bool:
        """True if a user wants the job to end."""
        return self.first == INTERRUPT

    @property
    def preempted(self) -> bool:
        """True if a scheduler wants the job to end."""
        return self.first in PREEMPT

    def __enter__(self) -> Self:
        signals = (INTERRUPT, *PREEMPT)
        self._previous_handlers = {number: signal.signal(number, self._note) for number in signals}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep a second SIGINT from raising while a checkpoint is written inside."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted and number == INTERRUPT and not self._deferred:
            raise KeyboardInterrupt
        self.first = self.first or signal.Signals(number)


class Deadline:
    """The end of a job's time: `max_minutes` from now, or the end of its Slurm allocation.

    The earlier one counts, on the monotonic clock. `environment` is that of the process.
    """

    def __init__(self, max_minutes: float | None, environment: Mapping[str, str]) -> None:
        left, least_spare_s, self.reason = math.inf, 0.0, ""
        if max_minutes is not None:
            left, self.reason = 60 * max_minutes, f"--run.max-minutes {max_minutes:g}"
        end = _allocation_end(environment)
        if end is not None and end - time.time() < left:
            left, least_spare_s = end - time.time(), _MIN_ALLOCATION_SPARE_S
            self.reason = f"the allocation ends {datetime.fromtimestamp(end)}"
        self.at = time.monotonic() + left
        self._spare_s = max(least_spare_s, min(_MAX_SPARE_S, _SPARE_FRACTION * left))

    def near(self, step_s: float, save_s: float) -> bool:
        """Return True if it is time to save and end, given the duration of a step and a save."""
        return self.at - time.monotonic() < 2 * (step_s + save_s) + self._spare_s


def _allocation_end(environment: Mapping[str, str]) -> float | None:
    """Return when this process's Slurm allocation ends, in seconds since the epoch, if known."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return None
    if (end := environment.get("SLURM_JOB_END_TIME", "")).isdecimal():  # since Slurm 23.02
        return float(end)
    try:
        # SLURM_TIME_FORMAT is scontrol's own; "standard" is local time.
        output = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_TIMEOUT_S,
            check=True,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
        ).stdout
        return datetime.fromisoformat(output.partition(" EndTime=")[2].split()[0]).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None  # without scontrol, or with EndTime=Unknown
