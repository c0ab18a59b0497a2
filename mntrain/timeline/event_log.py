"""The events of one rank while a timeline is recorded: in its memory, on its own clock.

Times are seconds of `time.perf_counter`. Any thread may call the methods; each takes about 1 us.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mntrain.comm.ticket import Ticket

TRAINING = "training"  # name of the thread that trains, in which autograd's threads count too


class Span(NamedTuple):
    """A time in which a thread has done one thing."""

    thread: str
    name: str
    start: float
    end: float


@dataclass(slots=True)
class LevelUse:
    """Messages and bytes sent at a level, and the time from the first to the last of them.

    To a message belongs its flight, until it has arrived here or left; copies in shared memory
    count as bytes without a message.
    """

    start: float
    end: float
    messages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Collective:
    """A collective of a stream that has begun; `end` is None until it is done."""

    stream: str
    ticket: Ticket
    start: float
    end: float | None = None
    levels: dict[str, LevelUse] = field(default_factory=dict)  # by level: "node" or "cross"


class EventLog:
    """The events of a rank from construction to `close`: at most so many, and how many it lacks.

    The thread that constructs it is the one that trains. What is sent outside of the collectives
    that it holds is left out.
    """

    def __init__(self, most: int) -> None:
        self.start, self.end = time.perf_counter(), 0.0
        self.spans: list[Span] = []
        self.collectives: list[Collective] = []
        self.lacks = 0
        self._left = most
        self._thread = threading.get_ident()
        self._running: dict[Ticket, Collective] = {}
        self._current: Collective | None = None  # whose steps run now
        self._entered = self.start  # when they were entered

    def span(self, name: str, start: float) -> None:
        """Add what the calling thread has done from a time until now."""
        if self._has_room():
            thread = threading.current_thread()
            trains = thread.ident == self._thread or thread.name.startswith("Dummy-")
            name_of = TRAINING if trains else thread.name
            self.spans.append(Span(name_of, name, max(start, self.start), time.perf_counter()))

    def begin(self, stream: str, ticket: Ticket) -> None:
        """Add a collective that begins."""
        if self._has_room():
            begun = Collective(stream, ticket, time.perf_counter())
            self._running[ticket] = begun
            self.collectives.append(begun)

    def finish(self, ticket: Ticket) -> None:
        """Note that a collective is done."""
        if (running := self._running.pop(ticket, None)) is not None:
            running.end = time.perf_counter()

    def enter(self, ticket: Ticket | None) -> None:
        """Note that the steps of a collective run from here on; None: of none."""
        self._current = None if ticket is None else self._running.get(ticket)
        self._entered = time.perf_counter()

    def sent(self, level: str, nbytes: int, messages: int) -> None:
        """Count messages that are sent now, or bytes that were copied since `enter`."""
        use = self._use(level, time.perf_counter() if messages else self._entered)
        use.messages += messages
        use.bytes += nbytes
        use.end = time.perf_counter()

    def in_flight(self, level: str) -> Callable[[], None]:
        """Return a function to call when a message that is started now has ended."""
        use = self._use(level, time.perf_counter())

        def ended() -> None:
            use.end = time.perf_counter()

        return ended

    def close(self) -> None:
        """Note the end. Nothing may be added after."""
        self.end = time.perf_counter()

    def _use(self, level: str, start: float) -> LevelUse:
        levels = {} if self._current is None else self._current.levels
        return levels.setdefault(level, LevelUse(start, start))

    def _has_room(self) -> bool:
        if self._left <= 0:
            self.lacks += 1
            return False
        self._left -= 1
        return True
