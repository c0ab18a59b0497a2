"""A collective under way: its pieces, which go on one by one or several at a time.

A piece is a generator that yields what to ask before it goes on. All ranks start pieces in one
order, and a piece waits for nothing but the same piece on other ranks.
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from mntrain.comm.intranode import Steps
from mntrain.comm.mpi import BANDWIDTH_BOUND, LATENCY_BOUND, TAGS, Backoff, WaitPolicy, pause

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Operation(Protocol[T_co]):
    """A collective, as the thread sees it. Called in this order, on the thread."""

    window: int  # how many pieces may be under way when one of its own starts
    light: bool  # whether it is so small that who waits for it may as well move it, piece by piece
    alone: bool  # whether who waits for it waits for nothing else

    def begin(self) -> None:
        """Let the tensor come to where the collective works on it. Asks nothing."""

    def enter(self) -> bool:
        """Tell the node that this rank's tensor is there. False: it is not yet; ask again."""

    def ready(self) -> bool:
        """Whether its pieces may start: everyone in the node has entered. Local."""

    def pieces(self) -> Iterator[tuple[int, Steps[None]]]:
        """The pieces in which this rank has work, in order, each with its number in the world."""

    def leave(self) -> None:
        """Tell the node that this rank's work is done."""

    def left(self) -> bool:
        """Whether everyone in the node has left, so that the tensor is this rank's again."""

    def finish(self) -> T_co:
        """The result."""


class Future(Generic[T]):
    """The result of a task, some day. `see_to` returns when it is settled."""

    def __init__(self, see_to: Callable[["Future[Any]"], None]) -> None:
        self._see_to = see_to
        self.settled = False
        self._result: T | None = None
        self._error: BaseException | None = None

    def settle(self, task: Callable[[], T]) -> None:
        """Run the task and keep what it returned or raised."""
        try:
            self._result = task()
        except BaseException as error:  # whatever it is, the waiting thread raises it
            self._error = error
        self.settled = True

    def fail(self, error: BaseException) -> None:
        """Have the waiting thread raise an error."""
        self._error = error
        self.settled = True

    def wait(self) -> T:
        """Block until the task has run; return what it returned, or raise what it raised."""
        self._see_to(self)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # T may itself be None


Numbered = tuple[int, Steps[None]]


def _least(*numbers: int | None) -> int:
    return min(number for number in numbers if number is not None)


class PendingCollective(Generic[T]):
    """A collective that the thread has in hand."""

    def __init__(self, operation: Operation[T], ticket: Future[T]) -> None:
        self._operation, self._ticket = operation, ticket
        self._waiting: Iterator[Numbered] | None = None  # pieces that have not started
        self._next: Numbered | None = None  # the first of them
        self._moving: list[tuple[Numbered, Callable[[], bool]]] = []  # in the order of numbers
        self.entered = self.started = self.left = False
        self.alone = operation.alone

    @property
    def pieces(self) -> int:
        """How many are under way."""
        return len(self._moving)

    @property
    def oldest(self) -> int | None:
        """The lowest number of a piece under way."""
        return self._moving[0][0][0] if self._moving else None

    @property
    def done(self) -> bool:
        """Whether this rank has no more work in it."""
        return self.started and not self._moving

    def begin(self) -> None:
        """See `Operation.begin`."""
        self._operation.begin()

    def enter(self) -> bool:
        """Enter, unless it has; whether it has now."""
        self.entered = self.entered or self._operation.enter()
        return self.entered

    def start(self, others: int, oldest: int | None) -> bool:
        """Start pieces; whether anything has happened.

        So many of other collectives are under way, of which the oldest has this number. None starts
        while another that would have the same tag is under way. The first one starts alone: whoever
        shares the core is to send something, too, before this rank sends more.
        """
        first = self._waiting is None
        if self._waiting is None:
            if not self._operation.ready():
                return False
            self._waiting = self._operation.pieces()
        happened = False
        while not self.started and others + len(self._moving) < self._operation.window:
            self._next = self._next or next(self._waiting, None)
            if self._next is None:
                self.started = happened = True
                break
            number = self._next[0]
            if number - _least(oldest, self.oldest, number) >= TAGS:
                break
            piece, self._next = self._next, None
            happened = True
            self._go_on(piece)
            if first:
                break
        return happened

    def move(self) -> bool:
        """Let every piece go on that can; whether any has."""
        first = next((n for n, (_, ask) in enumerate(self._moving) if ask()), None)
        if first is None:
            return False
        self._moving, after = self._moving[:first], self._moving[first:]
        self._go_on(after[0][0])
        for piece, ask in after[1:]:
            if ask():
                self._go_on(piece)
            else:
                self._moving.append((piece, ask))
        return True

    def leave(self) -> None:
        """Tell the others that this rank is done."""
        self._operation.leave()
        self.left = True

    def settle(self) -> bool:
        """Hand the tensor back, if all others are done too; whether it has been."""
        if not self._operation.left():
            return False
        self._ticket.settle(self._operation.finish)
        return True

    def fail(self, error: BaseException) -> None:
        """Give up: whoever waits gets the error."""
        self._ticket.fail(error)

    def is_light(self, ticket: Future[Any]) -> bool:
        """Whether this is what the ticket is for, and so small that one piece follows the other."""
        return self._ticket is ticket and self._operation.light

    def run(self) -> None:
        """Do all of it, one piece after the other, instead of all that is above.

        Other ranks may have several pieces under way: a piece waits only for itself on them.
        """
        operation = self._operation
        manner = LATENCY_BOUND if operation.alone else BANDWIDTH_BOUND
        operation.begin()
        _until(operation.enter, manner)
        _until(operation.ready, manner)
        for _, steps in operation.pieces():
            try:
                for ask in steps:
                    _until(ask, manner)
            finally:
                steps.close()
        operation.leave()
        _until(operation.left, manner)
        self._ticket.settle(operation.finish)

    def _go_on(self, piece: Numbered) -> None:
        for ask in piece[1]:
            if not ask():
                self._moving.append((piece, ask))
                return


def _until(ask: Callable[[], bool], manner: WaitPolicy) -> None:
    """Ask in this manner until the answer is yes."""
    if not ask():
        patience = Backoff()
        while not ask():
            pause(patience.delay(manner))
