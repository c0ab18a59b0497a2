"""The progress engine: several collectives in flight, a few chunks of each.

    queue        operations, and steps (small collectives, functions), as they were submitted
    active       at most DEPTH operations, in the order of the queue; without any, steps run alone
    in flight    a few of their chunks, started in one order: the first operation's first

Chunks and steps are generators that yield a test and continue when the test returns True. One
thread at a time tests all of them in turn, and sleeps after a round without progress, since other
ranks may need the core.

All ranks start chunks in the same order, and a chunk waits only for the same chunk on other ranks.
So the oldest unfinished chunk can always continue, and no circle of waiting ranks arises.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, TypeVar

from mntrain.comm.mpi import BACKGROUND, BANDWIDTH_BOUND, LATENCY_BOUND, Backoff, pause
from mntrain.comm.pending import Future, Operation, PendingCollective, Steps, steps_of
from mntrain.comm.shared_memory import DEPTH

T = TypeVar("T")
ABANDON_S = 1.0  # to wait for the thread's current round; a thread that blocks in MPI is left
_caller = threading.local()  # its `engine` is the one that the calling thread used last


class WakeEvent:
    """An event for one listening thread. `threading.Event` would allocate a lock for each wait."""

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """End the current wait, or the next one."""
        with suppress(RuntimeError):  # it is set already
            self._unset.release()

    def wait(self, seconds: float = -1) -> None:
        """Wait until the event is set or time is up, and clear it."""
        self._unset.acquire(timeout=seconds)

    def clear(self) -> None:
        """Unset the event."""
        self._unset.acquire(blocking=False)


class ProgressEngine:
    """Runs the collectives of a world, on its own thread or on a thread that waits for one.

    Collectives and functions run in the order of their submission, which must be the same on every
    rank. The engine's thread progresses them while callers compute; a caller that waits does so
    itself, which saves two thread switches. Only one thread at a time makes MPI calls.
    """

    def __init__(self) -> None:
        self._queue: deque[Future[Any]] = deque()
        self._active: deque[PendingCollective[Any]] = deque()
        self._backoff = Backoff()
        self._closed = ""  # why nothing more is accepted
        self._abandoned = False
        self.waited_s = 0.0  # by callers, for collectives
        self._busy_before_s = 0.0  # the part of `busy_s` before `_busy_since`
        self._busy_since: float | None = None
        self._turn = threading.Lock()  # held by the thread that progresses the collectives
        self._waiters: deque[None] = deque()  # one entry for every caller that wants the turn
        self._first: Callable[[], object] | None = None
        self._wake = WakeEvent()  # set on submissions, and by callers that want the turn
        self._thread = threading.Thread(target=self._run, name="mntrain communication", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T] | Steps[T], *, wake: bool = True) -> Future[T]:
        """Queue a collective; return at once. Raises RuntimeError after `close` and `abandon`.

        Operations run in chunks, several at a time; steps run when nothing is active.

        Without `wake`, the collective progresses, in the order of the queue, when a caller waits
        for any future of this engine, or when a later submission or `call` wakes the thread. Until
        one of these happens on every rank, the others wait. Ranks may differ in which one happens
        and when, without a deadlock, since each progresses the whole queue in the same order. A
        caller that turns to another engine wakes the thread of this one first. While the collective
        is pending, it must not wait for other ranks otherwise, for example in a blocking MPI call.
        """
        if isinstance(operation, Generator):
            return self._put(Future(operation, self.drive_until), wake=wake)
        return self._put(PendingCollective(operation, self.drive_until), wake=wake)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function that runs when nothing is active. Raises RuntimeError as `submit`."""
        return self._put(Future(steps_of(function), self.drive_until), wake=True)

    def drive_until(self, future: Future[Any]) -> None:
        """Progress collectives until a future is done. Raises RuntimeError after `abandon`."""
        if future.done:
            return
        self._turn_to()
        self._waiters.append(None)
        try:
            if self._turn.locked():
                self._wake.set()
            while not self._turn.acquire(timeout=ABANDON_S):
                self._check_not_abandoned()
            try:
                self._wake.clear()
                while not future.done:
                    self._check_not_abandoned()
                    moved = self._round()
                    if not future.done:  # the result is not kept from the caller by a yield
                        self._rest(moved=moved)
            finally:
                self._turn.release()
        finally:  # also after an interrupt, the thread takes over
            self._waiters.pop()
            if not self.idle and any(t.wakes_thread for t in (*self._active, *self._queue)):
                self._wake.set()

    def prepare(self, function: Callable[[], object]) -> None:
        """Run a function once on the engine's own thread, before anything else runs there."""
        self._first = function

    def close(self) -> None:
        """Finish what is queued and end the thread. Collective; local after `abandon`."""
        if not self._abandoned:
            self.call(self._refuse_more).wait()
        self._wake.set()
        self._thread.join(ABANDON_S if self._abandoned else None)

    def abandon(self) -> None:
        """Stop without finishing what is queued. Local; does not wait for other ranks.

        Every pending future and every later use raises RuntimeError. Tensors of pending collectives
        are kept for the life of the process, since MPI may still access them. If a thread still
        blocks in an MPI call when the process exits, MPICH's MPI_Finalize may crash.
        """
        self._closed = self._closed or "this world was abandoned: no communication after `abandon`"
        self._abandoned = True
        atexit.register(lambda *kept: None, self._queue, self._active)  # keeps them until the end
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(ABANDON_S)

    def check_open(self) -> None:
        """Raise RuntimeError after `close` or `abandon`."""
        if self._closed:
            raise RuntimeError(self._closed)

    @property
    def idle(self) -> bool:
        """True if nothing is queued or active."""
        return not (self._queue or self._active)

    @property
    def busy_s(self) -> float:
        """Seconds so far in which a collective was active."""
        since = self._busy_since
        return self._busy_before_s + (time.perf_counter() - since if since is not None else 0.0)

    def _put(self, task: Future[T], *, wake: bool) -> Future[T]:
        self.check_open()
        self._turn_to()
        task.wakes_thread = wake
        self._queue.append(task)
        if wake:
            self._wake.set()
        return task

    def _turn_to(self) -> None:
        """Wake the thread of the engine that the calling thread leaves for this one."""
        last = getattr(_caller, "engine", None)
        if last is not self:
            _caller.engine = self
            if last is not None:
                last._wake.set()

    def _refuse_more(self) -> None:
        self._closed = "this world is closed: no communication after its `with` block"

    def _check_not_abandoned(self) -> None:
        if self._abandoned:
            raise RuntimeError(self._closed)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            with self._turn:
                self._wake.clear()
                if self._first is not None:
                    self._first()
                    self._first = None
                while not (self.idle or self._waiters or self._abandoned):
                    self._rest(moved=self._round())

    def _round(self) -> bool:
        """Progress everything once; return whether anything moved."""
        if self._busy_since is None:
            self._backoff.begin()
        moved = bool(self._queue) and self._take_from_queue()
        try:
            moved = (bool(self._active) and self._advance()) or moved
        except BaseException as error:  # nothing is known of those behind it, either
            moved = True
            while self._active:
                self._active.popleft().fail(error)
        if moved:
            self._update_clock()
            self._backoff.reset()
        return moved

    def _rest(self, *, moved: bool) -> None:
        """Give up the core: for a moment after progress, else until the next test is due."""
        if moved and not self._active:
            return  # steps that run alone have started, and may be done already
        if moved:
            pause(0)
        elif not self._waiters:
            self._wake.wait(self._backoff.delay(BACKGROUND))
        elif all(pending.operation.latency_bound for pending in self._active):
            pause(self._backoff.delay(LATENCY_BOUND))
        else:
            pause(self._backoff.delay(BANDWIDTH_BOUND))

    def _update_clock(self) -> None:
        """Start or stop the clock of `busy_s`."""
        busy = self._active or (self._queue and self._queue[0].started)
        if busy and self._busy_since is None:
            self._busy_since = time.perf_counter()
        elif not busy and self._busy_since is not None:
            self._busy_before_s, self._busy_since = self.busy_s, None

    def _take_from_queue(self) -> bool:
        """Begin what may begin, and advance steps that run alone; return whether anything moved."""
        moved = False
        while self._queue and len(self._active) < DEPTH:
            task = self._queue[0]
            if isinstance(task, PendingCollective):
                task.operation.begin()
                self._active.append(task)
                self._queue.popleft()
                moved = True
            elif self._active:
                break
            else:
                try:
                    moved = task.advance() or moved
                finally:
                    if task.done:
                        self._queue.popleft()
                return moved
        return moved

    def _advance(self) -> bool:
        """Advance every active collective as far as it can go; return whether any did."""
        active, moved, may_start, oldest = self._active, False, True, None
        in_flight = sum([len(pending.in_flight) for pending in active])
        for pending in active:
            if not pending.entered:
                if not pending.operation.enter():
                    break
                pending.entered = moved = True
            before = len(pending.in_flight)
            if before:
                moved = pending.advance_chunks() or moved
            if may_start and not pending.all_started:
                moved = pending.start_chunks(in_flight - before, oldest) or moved
            may_start = may_start and pending.all_started
            oldest = pending.oldest if oldest is None else oldest
            in_flight += len(pending.in_flight) - before
        for pending in active:
            if not pending.left:
                if pending.in_flight or not pending.all_started:
                    break
                pending.operation.leave()
                pending.left = moved = True
        while active and active[0].left and active[0].operation.all_left():
            active.popleft().advance()
            moved = True
        return moved
