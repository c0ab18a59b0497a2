"""The progress engine: the streams of a world, driven by one thread at a time.

Chunks and steps are generators that yield a test and continue when the test returns True. One
thread at a time tests those of all streams in turn, and sleeps after a round without progress,
since other ranks may need the core.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from mntrain.comm.backoff import BACKGROUND, BANDWIDTH_BOUND, LATENCY_BOUND, Backoff, pause
from mntrain.comm.disagreement import DisagreementWatch
from mntrain.comm.forked import call_in_child
from mntrain.comm.pending import Future, Operation, PendingCollective, Steps, steps_of
from mntrain.comm.stream import Stream
from mntrain.comm.ticket import Ticket
from mntrain.comm.waits import Waits

T = TypeVar("T")
STALL_S = 2.0  # without progress, until ranks compare what they call
TURN_S = 1e-3  # between two looks of a caller at its future while another caller has the turn
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

    Collectives and functions of one stream, by default `main`, run in the order of their
    submission, which must be the same on every rank. The engine's thread progresses them while
    callers compute; a caller that waits does so itself, which saves two thread switches. Only one
    thread at a time makes MPI calls.
    """

    def __init__(self) -> None:
        self.main = Stream("the world")
        self.streams = [self.main]
        self.watch: DisagreementWatch | None = None
        self._backoff = Backoff()
        self._closed: Exception | None = None  # why nothing more is accepted
        self._abandoned = False
        self.error: Exception | None = None  # by which `stop` ended all communication
        self.waits = Waits()  # of callers
        self._busy_before_s = 0.0  # the part of `busy_s` before `_busy_since`
        self._busy_since: float | None = None
        self._turn = threading.Lock()  # held by the thread that progresses the collectives
        # Every caller that wants the turn: the stream that it waits for, and since when.
        self._waiters: deque[tuple[str, float]] = deque()
        self._moved_at = 0.0  # when anything last made progress
        self._callers: set[int] = set()  # the threads that have submitted something
        self._first: Callable[[], object] | None = None
        self._wake = WakeEvent()  # set on submissions, and by callers that want the turn
        self._thread = threading.Thread(target=self._run, name="mntrain communication", daemon=True)
        self._thread.start()
        call_in_child(self._refuse_in_child)

    def add_stream(self, name: str, ranks: Sequence[int] | None = None) -> Stream:
        """Return a new stream; see `Stream`."""
        stream = Stream(name, ranks)
        stream.observer = self.main.observer
        self.streams.append(stream)
        return stream

    def submit(
        self,
        operation: Operation[T] | Steps[T],
        *,
        wake: bool = True,
        stream: Stream | None = None,
        ticket: Ticket | None = None,
    ) -> Future[T]:
        """Queue a collective; return at once. Raises RuntimeError after `close` and `abandon`.

        Operations run in chunks, several at a time; steps run when nothing of their stream is
        active. What has no `ticket` is local, or a collective that is not compared.

        Without `wake`, the collective progresses, in the order of the queue, when a caller waits
        for any future of this engine, or when a later submission or `call` wakes the thread. Until
        one of these happens on every rank, the others wait. Ranks may differ in which one happens
        and when, without a deadlock, since each progresses the whole queue in the same order. A
        caller that turns to another engine wakes the thread of this one first. While the collective
        is pending, it must not wait for other ranks otherwise, for example in a blocking MPI call.
        """
        self.check_open()
        self._turn_to()
        task: Future[T]
        if isinstance(operation, Generator):
            task = Future(operation, self.drive_until)
        else:
            task = PendingCollective(operation, self.drive_until)
        stream = stream or self.main
        task.wakes_thread, task.ticket, task.stream = wake, ticket, stream.name
        self._callers.add(threading.get_ident())
        stream.queue.append(task)
        if wake:
            self._wake.set()
        return task

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function that runs when nothing of the main stream is active, as `submit`."""
        return self.submit(steps_of(function))

    def drive_until(self, future: Future[Any]) -> None:
        """Progress collectives until a future is done. Raises RuntimeError after `abandon`."""
        if future.done:
            return
        self._check_not_abandoned()
        self._turn_to()
        waiter = future.stream, time.monotonic()
        self._waiters.append(waiter)
        try:
            if self._turn.locked():
                self._wake.set()
            while not self._turn.acquire(timeout=TURN_S):
                self._check_not_abandoned()
                if future.done:  # by another caller, which still waits for its own
                    return
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
            self._waiters.remove(waiter)
            tasks = (task for s in self.streams for task in (*s.active, *s.queue))
            if any(task.wakes_thread for task in tasks):
                self._wake.set()

    def progress(self, futures: Iterable[Future[Any]]) -> None:
        """Let the engine's thread progress futures while nobody waits for them. Local."""
        for future in futures:
            future.wakes_thread = True
        self._wake.set()

    def prepare(self, function: Callable[[], object]) -> None:
        """Run a function once on the engine's own thread, before anything else runs there."""
        self._first = function

    def finish(self, ticket: Ticket) -> None:
        """Finish what is queued, on all ranks; nothing may be queued after. Collective."""

        def steps() -> Steps[None]:
            others = self.streams[1:]
            yield lambda: all(stream.idle for stream in others)
            for stream in others:  # no other collective follows on this rank
                stream.begin(ticket.copy())
            if self.watch is not None:
                yield from self.watch.close(ticket)

        self.submit(steps(), ticket=ticket).wait()

    def close(self) -> None:
        """Finish what is queued here and end the thread. Local."""
        if not self._abandoned:
            self.call(lambda: None).wait()
            self._closed = RuntimeError(
                "this world is closed: no communication after its `with` block"
            )
        self._wake.set()
        self._thread.join(ABANDON_S if self._abandoned else None)

    def abandon(self) -> None:
        """Stop without finishing what is queued. Local; does not wait for other ranks.

        Every pending future and every later use raises RuntimeError. Tensors of pending collectives
        are kept for the life of the process, since MPI may still access them. If a thread still
        blocks in an MPI call when the process exits, MPICH's MPI_Finalize may crash.
        """
        self._halt(RuntimeError("this world was abandoned: no communication after `abandon`"))
        if threading.current_thread() is not self._thread:
            self._thread.join(ABANDON_S)

    def stop(self, error: Exception) -> None:
        """Make every pending future and every later use raise an error; wait for nothing. Local."""
        self.error = self.error or error
        self._halt(error)

    def check_open(self) -> None:
        """Raise RuntimeError after `close` or `abandon`."""
        if self._closed:
            raise self._closed

    @property
    def abandoned(self) -> bool:
        """True after `abandon`, and after an error that ended all communication."""
        return self._abandoned

    @property
    def idle(self) -> bool:
        """True if nothing is queued or active."""
        return all(stream.idle for stream in self.streams)

    def awaited(self) -> tuple[Stream, float] | None:
        """Return the stream for which a caller waits, and when the wait began or anything moved.

        None if no caller waits. Safe from any thread.
        """
        waiters = list(self._waiters)
        if not waiters:
            return None
        name, since = waiters[0]
        stream = next(stream for stream in self.streams if stream.name == name)
        return stream, max(since, self._moved_at)

    @property
    def busy_s(self) -> float:
        """Seconds so far in which a collective was active."""
        since = self._busy_since
        return self._busy_before_s + (time.perf_counter() - since if since is not None else 0.0)

    def _turn_to(self) -> None:
        """Wake the thread of the engine that the calling thread leaves for this one."""
        last = getattr(_caller, "engine", None)
        if last is not self:
            _caller.engine = self
            if last is not None:
                last._wake.set()

    def _halt(self, error: Exception) -> None:
        """Refuse all uses, and keep the tensors of pending collectives until the process ends."""
        self._closed = self._closed or error
        self._abandoned = True
        atexit.register(lambda *kept: None, *self.streams)
        self._wake.set()

    def _refuse_in_child(self) -> None:
        self._abandoned = True
        self._closed = RuntimeError(
            "this process is a forked child of a rank and cannot communicate: leave collectives to "
            "the rank; if the child reads parameters, call `optimizer.wait_for_parameters()` "
            "before the fork"
        )

    def _check_not_abandoned(self) -> None:
        if self._abandoned and self._closed is not None:
            raise self._closed

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
        moved = False
        for stream in self.streams:
            if stream.queue or stream.active:
                moved = stream.progress() or moved
        if moved:
            self._update_clock()
            self._backoff.reset()
            self._moved_at = time.monotonic()
        elif self.watch is not None and self._backoff.waited_s > STALL_S:
            error = self.watch.look(self._waits_in())
            if error is not None:
                self.stop(error)
        return moved

    def _waits_in(self) -> str:
        """Return the stream for which the only thread that uses this engine waits, or ""."""
        callers = [t for t in threading.enumerate() if t.ident in self._callers]
        return self._waiters[0][0] if len(callers) == len(self._waiters) == 1 else ""

    def _rest(self, *, moved: bool) -> None:
        """Give up the core: for a moment after progress, else until the next test is due."""
        active = [pending for stream in self.streams for pending in stream.active]
        if moved and not active:
            return  # steps that run alone have started, and may be done already
        if moved:
            pause(0)
        elif not self._waiters:
            self._wake.wait(self._backoff.delay(BACKGROUND))
        elif all(pending.operation.latency_bound for pending in active):
            pause(self._backoff.delay(LATENCY_BOUND))
        else:
            pause(self._backoff.delay(BANDWIDTH_BOUND))

    def _update_clock(self) -> None:
        """Start or stop the clock of `busy_s`."""
        busy = any(stream.busy for stream in self.streams)
        if busy and self._busy_since is None:
            self._busy_since = time.perf_counter()
        elif not busy and self._busy_since is not None:
            self._busy_before_s, self._busy_since = self.busy_s, None
