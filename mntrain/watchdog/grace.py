"""The time that a job has after a signal to end its step."""

import signal
import time

_SENDERS_S = 1.0  # in which a launcher and a scheduler may both pass on one signal
_ENDING = (signal.SIGINT, signal.SIGTERM)  # one of these ends a job that has had a signal


class Grace:
    """The time that is left after one of some signals.

    `second_ends`: a second one ends it. `option` is what the user sets the seconds with.
    """

    def __init__(
        self,
        numbers: frozenset[int] = frozenset(),
        seconds: float = 0.0,
        *,
        second_ends: bool = False,
        option: str = "",
    ) -> None:
        self.numbers, self._seconds, self._second_ends = numbers, seconds, second_ends
        self._option = option
        self._first_at: float | None = None
        self.deadline: float | None = None
        self.reason = ""
        self.interrupt = False

    def arrived(self, number: int, rank: int) -> None:
        """Note a signal."""
        if number not in self.numbers:
            return
        now, name = time.monotonic(), signal.Signals(number).name
        if self._first_at is None:
            self._first_at, self.deadline = now, now + self._seconds
            self.reason = (
                f"{name} on rank {rank}: the step has not ended within {self._seconds:g} s "
                f"({self._option})"
            )
            self.interrupt = number == signal.SIGINT
        elif self._second_ends and number in _ENDING and now > self._first_at + _SENDERS_S:
            self.deadline = now
            self.reason = f"a second signal, {name} on rank {rank}, ends the job at once"

    def over(self, now: float) -> bool:
        """Return whether the time is over."""
        return self.deadline is not None and now >= self.deadline
