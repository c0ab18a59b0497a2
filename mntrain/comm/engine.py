"""The communication thread keeps several collectives under way, and a few pieces of them.

    queue       what was handed in
    entered     at most DEPTH collectives, in the order in which they were handed in
    pieces      a few of them under way, started in one order: the first collective's first

A piece is a generator that yields what to ask before it goes on. The thread asks all of them in
turn, and when nothing has moved for a while it sleeps between rounds, so that the core computes for
somebody who does not wait.

All ranks start pieces in the same order, and a piece waits for nothing but the same piece on other
ranks: so the first unfinished one can always go on, and nobody waits in a circle.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from mntrain.comm.mpi import BACKGROUND, BANDWIDTH_BOUND, LATENCY_BOUND, Backoff, WaitPolicy, pause
from mntrain.comm.pending import Future, Operation, PendingCollective
from mntrain.comm.shared_flags import DEPTH

# How long something light may rest that nobody waits for.
REST_S = 20e-3
RESTS = 50  # of the thread in a row, before it sleeps until it is rung

T = TypeVar("T")


class WakeEvent:
    """Wakes the one thread that listens. An Event would make a lock for every wait."""

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """End the wait that is under way, or the next one."""
        with suppress(RuntimeError):  # it rings already
            self._silent.release()

    def wait(self, seconds: float = -1) -> bool:
        """Sleep until it rings, or for so long; whether it has. Then it is silent."""
        return self._silent.acquire(timeout=seconds)

    def hush(self) -> None:
        """Let it be silent."""
        self._silent.acquire(blocking=False)


Task = PendingCollective[Any] | Callable[[], None]


class ProgressEngine:
    """What moves the collectives of a world: one thread, or whoever waits for one of them.

    Collectives and functions run in the order in which they are handed in: on every rank the same
    order, as collectives need. A thread of its own moves them while the caller computes; a caller
    that waits does so itself meanwhile, which saves waking another thread twice. Only one of them
    at a time makes MPI calls. Idle, the thread sleeps.
    """

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque()
        self._under_way: deque[PendingCollective[Any]] = deque()
        self._patience = Backoff()
        self._open = True
        self.waited_s = 0.0  # by callers, for collectives
        self._idle_at = 0.0  # seconds under way when nothing was, last
        self._since: float | None = None  # when something was, after that
        self._turn = threading.Lock()  # whoever holds it moves the collectives
        self._waiters: deque[None] = deque()  # one for every caller who wants it
        self._first: Callable[[], object] | None = None  # what the thread is to do before more
        self._dozes = False  # whether the thread will look for what is to do without being rung
        self._bell = WakeEvent()  # rung when something is handed in, or the turn wanted
        self._thread = threading.Thread(target=self._run, name="mntrain communication", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T]) -> Future[T]:
        """Queue a collective. Returns at once. RuntimeError after `close`.

        A light one wakes nobody: it rests until it is waited for, until something else comes, or
        for REST_S. Who waits for it while there is nothing else moves it from end to end.
        """
        ticket: Future[T] = Future(self.see_to)
        self._put(PendingCollective(operation, ticket), wake=not operation.light)
        return ticket

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function; it runs when nothing is under way. RuntimeError after `close`."""
        ticket: Future[T] = Future(self.see_to)
        self._put(lambda: ticket.settle(function))
        return ticket

    def see_to(self, ticket: Future[Any]) -> None:
        """Return when a ticket is settled; until then, move the collectives."""
        if ticket.settled or self._run_at_once(ticket):
            return
        self._waiters.append(None)
        try:  # whatever interrupts this, the thread is to go on
            if self._turn.locked():
                self._bell.ring()
            with self._turn:
                self._bell.hush()
                while not ticket.settled:
                    pause(self._round(LATENCY_BOUND))
        finally:
            self._waiters.pop()
            if self._busy:
                self._bell.ring()

    def _run_at_once(self, ticket: Future[Any]) -> bool:
        """Run what a ticket is for, if it is light and there is nothing else to do; whether so."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            task = self._tasks[0] if len(self._tasks) == 1 and not self._under_way else None
            if not isinstance(task, PendingCollective) or not task.is_light(ticket):
                return False
            self._tasks.popleft()
            self._under_way.append(task)
            self._count_time()
            try:
                task.run()
            except BaseException as error:
                task.fail(error)
            self._under_way.clear()
            self._count_time()
            return True
        finally:
            self._turn.release()

    def prepare(self, function: Callable[[], object]) -> None:
        """Let the thread itself do something first, and not whoever waits for it. Once."""
        self._first = function

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self.call(self._end).wait()
        self._bell.ring()
        self._thread.join()

    def expect_open(self) -> None:
        """RuntimeError after `close`."""
        if not self._open:
            raise RuntimeError("this world is closed: no communication after its `with` block")

    def _put(self, task: Task, *, wake: bool = True) -> None:
        self.expect_open()
        self._tasks.append(task)
        if wake or not self._dozes:
            self._bell.ring()

    def _end(self) -> None:
        self._open = False

    @property
    def _busy(self) -> bool:
        return bool(self._tasks or self._under_way)

    def _run(self) -> None:
        while self._open:
            self._rest()
            with self._turn:
                self._bell.hush()
                if self._first is not None:
                    self._first()
                    self._first = None
                while self._busy and not self._waiters:
                    delay = self._round(BACKGROUND)
                    if not delay:
                        pause(0)
                    else:
                        self._bell.wait(delay)

    def _rest(self) -> None:
        """Sleep until something is to do: rung, or looking now and then while light ones come."""
        self._dozes = True
        for _ in range(RESTS):
            if self._bell.wait(REST_S) or self._busy or self._first:
                return
        self._dozes = False
        if not self._busy:  # whoever has come in since rings
            self._bell.wait()

    def _round(self, manner: WaitPolicy) -> float:
        """Let everything go on that can; the seconds to wait before the next round."""
        if not self._under_way:
            self._patience.begin()
        happened = self._take_in()
        try:
            happened = self._move() or happened
        except BaseException as error:  # nothing can be known of those behind it, either
            while self._under_way:
                self._under_way.popleft().fail(error)
        self._count_time()
        if happened:
            self._patience.reset()
            return 0.0
        if manner is LATENCY_BOUND and not all(one.alone for one in self._under_way):
            manner = BANDWIDTH_BOUND
        return self._patience.delay(manner)

    @property
    def busy_s(self) -> float:
        """Seconds in which a collective was under way, so far."""
        since = self._since
        return self._idle_at + (time.perf_counter() - since if since is not None else 0.0)

    def _count_time(self) -> None:
        """Start or stop the clock of `busy_s`."""
        if self._under_way and self._since is None:
            self._since = time.perf_counter()
        elif not self._under_way and self._since is not None:
            self._idle_at, self._since = self.busy_s, None

    def _take_in(self) -> bool:
        """Begin what can begin; whether anything has."""
        happened = False
        while len(self._under_way) < DEPTH:
            if not self._tasks:
                break
            task = self._tasks[0]
            if isinstance(task, PendingCollective):
                task.begin()
                self._under_way.append(task)
            elif self._under_way:
                break
            else:
                task()
            self._tasks.popleft()
            happened = True
        return happened

    def _move(self) -> bool:
        """Let every collective go on that can; whether any has."""
        happened, may_start, oldest = False, True, None
        moving = sum(one.pieces for one in self._under_way)
        for one in self._under_way:
            if not one.entered:
                if not one.enter():
                    break
                happened = True
            before = one.pieces
            if before:
                happened = one.move() or happened
            if may_start and not one.started:
                happened = one.start(moving - before, oldest) or happened
            may_start = may_start and one.started
            oldest = one.oldest if oldest is None else oldest
            moving += one.pieces - before
        for one in self._under_way:
            if not one.left:
                if not one.done:
                    break
                one.leave()
                happened = True
        while self._under_way and self._under_way[0].left and self._under_way[0].settle():
            self._under_way.popleft()
            happened = True
        return happened
