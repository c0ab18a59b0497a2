"""Signals as requests: noted by a handler, acted on by all ranks at the end of a step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

# Somebody at a terminal wants the job to end; Open MPI's mpirun makes SIGTERM of it for its ranks.
INTERRUPT = signal.SIGINT
# A scheduler wants the node back: SIGTERM before it kills; SIGUSR1 or 2 where a script asks for it.
PREEMPT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class SignalRequests:
    """While entered, signals are noted; a second SIGINT interrupts, but not inside `saving`."""

    def __init__(self) -> None:
        self.noted: signal.Signals | None = None  # the first of them
        self._before: dict[signal.Signals, Any] = {}
        self._saving = False

    @property
    def interrupted(self) -> bool:
        """Whether somebody wants this job to end."""
        return self.noted == INTERRUPT

    @property
    def preempted(self) -> bool:
        """Whether a scheduler does."""
        return self.noted in PREEMPT

    def __enter__(self) -> Self:
        """Take over the signals."""
        self._before = {
            number: signal.signal(number, self._note) for number in (INTERRUPT, *PREEMPT)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        for number, before in self._before.items():
            signal.signal(number, before)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let no signal end what is done inside."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted and number == INTERRUPT and not self._saving:
            raise KeyboardInterrupt
        self.noted = self.noted or signal.Signals(number)
