"""One collective in flight: its state, its chunks, and the future that its caller waits for."""

import signal
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, Protocol, TypeVar

from mntrain.comm.mpi import CHUNK_TAGS
from mntrain.comm.ticket import Ticket

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# A generator that yields a test and continues when the test returns True: many take turns in one
# thread. It returns a T.
Steps = Generator[Callable[[], bool], None, T]
# The number of a chunk among all chunks of the world, and its steps.
NumberedChunk = tuple[int, Steps[None]]


class Operation(Protocol[T_co]):
    """A collective as the engine drives it. Methods are called in this order, and never block."""

    max_in_flight: int  # it starts no chunk while so many are in flight, of all collectives
    latency_bound: bool  # True: its caller waits for nothing else, so polling may be eager

    def begin(self) -> None:
        """Start to bring the tensor to where the collective works on it."""

    def enter(self) -> bool:
        """Announce this rank's tensor to its node; False while the tensor is not in place yet."""

    def all_entered(self) -> bool:
        """Return whether every rank of the node has entered, so that chunks may start."""

    def chunks(self) -> Iterator[NumberedChunk]:
        """Yield the chunks in which this rank takes part, in ascending order of their numbers."""

    def leave(self) -> None:
        """Announce to the node that this rank's work is done."""

    def all_left(self) -> bool:
        """Return whether every rank of the node has left, so that the tensor is free again."""

    def finish(self) -> T_co:
        """Return the result."""


class Future(Generic[T]):
    """The result of steps that the engine runs later, when nothing else of the stream is active.

    `wakes_thread`: whether the engine's thread runs them while no caller waits. `ticket`: of a
    collective that ranks compare. `stream`: its name.
    """

    wakes_thread = True
    ticket: Ticket | None = None
    stream = ""

    def __init__(self, steps: Steps[T], drive_until: Callable[["Future[Any]"], None]) -> None:
        self._steps, self._drive_until = steps, drive_until
        self._test: Callable[[], bool] | None = None
        self.done = False
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """True if `wait` raises an error."""
        return self._error is not None

    @property
    def started(self) -> bool:
        """True if the first of the steps has run."""
        return self._test is not None

    def advance(self) -> bool:
        """Continue the steps as far as tests succeed; return whether anything happened.

        Raises only an interrupt, such as KeyboardInterrupt: it is of the thread that drives.
        """
        moved = False
        try:
            while self._test is None or self._test():
                moved = True
                self._test = next(self._steps)
        except StopIteration as end:
            self._result, self.done = end.value, True
        except BaseException as error:  # of any kind: the waiting thread raises it
            moved = True
            self.fail(error)
            if is_interrupt(error):
                raise
        return moved

    def fail(self, error: BaseException) -> None:
        """Make `wait` raise an error, and release what the steps hold."""
        self._steps.close()
        self._error, self.done = error, True

    def wait(self) -> T:
        """Block until the steps have run; return their result or raise their error. Repeatable."""
        self._drive_until(self)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # T may itself be None


def steps_of(function: Callable[[], T]) -> Steps[T]:
    """Return steps that call a function and return its result."""
    yield from ()
    return function()


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is none of the code that it ended: a signal handler has raised it.

    Python runs handlers between any two instructions of the main thread. KeyboardInterrupt is the
    common one; that of torch raises a RuntimeError when a process of a DataLoader has died.
    """
    if not isinstance(error, Exception):
        return True
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


class PendingCollective(Future[T]):
    """A collective in the engine, and the future of its result."""

    def __init__(self, operation: Operation[T], drive_until: Callable[[Future[Any]], None]) -> None:
        super().__init__(steps_of(operation.finish), drive_until)
        self.operation = operation
        self._unstarted: Iterator[NumberedChunk] | None = None
        self._next: NumberedChunk | None = None  # the first unstarted chunk
        # Chunks in flight and the test that each waits for, in the order of their numbers.
        self.in_flight: list[tuple[NumberedChunk, Callable[[], bool]]] = []
        self.entered = self.all_started = self.left = False

    @property
    def oldest(self) -> int | None:
        """The lowest number of a chunk in flight."""
        return self.in_flight[0][0][0] if self.in_flight else None

    def start_chunks(self, others: int, oldest: int | None) -> bool:
        """Start chunks as far as allowed; return whether anything happened.

        `others` is the number of other collectives' chunks in flight, `oldest` the lowest number
        among them. No chunk starts while another one with the same tag is in flight. The first
        chunk starts alone: other ranks on this core send their first one before this rank goes on.
        """
        moved = first = self._unstarted is None
        if self._unstarted is None:
            if not self.operation.all_entered():
                return False
            self._unstarted = self.operation.chunks()
            self._next = next(self._unstarted, None)
        while self._next and others + len(self.in_flight) < self.operation.max_in_flight:
            lowest = self.oldest if oldest is None else oldest
            if lowest is not None and self._next[0] - lowest >= CHUNK_TAGS:
                break
            self._continue(self._next)
            self._next, moved = next(self._unstarted, None), True
            if first:
                break
        self.all_started = self._next is None
        return moved

    def advance_chunks(self) -> bool:
        """Continue every chunk whose test succeeds; return whether any did."""
        for first, (_, test) in enumerate(self.in_flight):  # noqa: B007 - used below
            if test():
                break
        else:
            return False
        self.in_flight, rest = self.in_flight[:first], self.in_flight[first:]
        self._continue(rest[0][0])
        for chunk, test in rest[1:]:
            if test():
                self._continue(chunk)
            else:
                self.in_flight.append((chunk, test))
        return True

    def fail(self, error: BaseException) -> None:
        """Make `wait` raise an error, and release what the chunks in flight hold."""
        for (_, steps), _ in self.in_flight:
            steps.close()
        self.in_flight.clear()
        super().fail(error)

    def _continue(self, chunk: NumberedChunk) -> None:
        try:
            for test in chunk[1]:
                if not test():
                    self.in_flight.append((chunk, test))
                    return
        except BaseException:
            chunk[1].close()
            raise
