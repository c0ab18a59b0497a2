"""The progress engine: the streams of a world, driven by one thread at a time.

A stream has the collectives of one communicator, which all ranks call in one order:

    queue        as submitted
    active       up to DEPTH pipelined collectives, in this order; or one that runs alone
    in flight    a few of their chunks, started in one order: the first collective's first

The steps of a collective are a generator that yields a test and continues when the test returns
True; so are those of each chunk. A pipelined collective passes its n-th test after the one before
it has, and a chunk waits only for the same chunk on other ranks. So the oldest unfinished chunk can
always continue, and no circle of waiting ranks arises. Streams do not wait for each other: the
order between them may differ between ranks.

Each collective has a ticket, which is numbered when the collective begins. Ranks whose tickets of
one number have unequal digests receive no messages from each other.

`ProgressEngine._test_all` runs the tests of all streams in turn, and `_rest` sleeps if none of them
has succeeded, since other ranks may need the core.
"""

import atexit
import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from inspect import CO_GENERATOR
from traceback import walk_tb
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from mntrain.comm import clock
from mntrain.comm.forked import call_in_child
from mntrain.comm.mpi import CHUNK_TAGS
from mntrain.comm.shared_memory import DEPTH
from mntrain.comm.ticket import MASK, SPREAD, Ticket, digest_of, text_of
from mntrain.recorder.events import Recorder

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Test = Callable[[], bool]
Steps = Generator[Test, None, T]
NumberedChunk = tuple[int, Steps[None]]  # its number among all chunks of the communicator

HISTORY = 64  # tickets that a stream keeps; only the root of broadcasts can be further ahead
STALL_S = 2.0  # without progress, until ranks compare what they call
GATHER_S = 10e-3  # of calls that gather, until the thread takes them
TURN_S = 1e-3  # between two looks of a caller at its future while another caller has the turn
ABANDON_S = 1.0  # to wait for the thread's current tests; a thread that blocks in MPI is left
_caller = threading.local()  # its `engine` is the one that the calling thread used last


class Pipelined(NamedTuple):
    """A collective that runs among others of its stream.

    Where `steps` yield an iterator of chunks instead of a test, the engine starts the chunks, in
    turns with those of other collectives, and continues when all have ended.
    """

    steps: Generator[Test | Iterator[NumberedChunk], None, Any]
    max_in_flight: int  # no chunk starts while so many are in flight, of all collectives
    latency_bound: bool  # True: its caller waits for nothing else, so polling may be eager


class Future(Generic[T_co]):
    """A collective or function in a stream, and its result; a `zero.collectives.Work`.

    `wakes_thread`: whether the engine's thread runs it while no caller waits; `gathers`: after a
    while, together with those that follow. `of_objects`: whether it gathers small objects.
    `stream`: its name. `awaited_since`: see `ProgressEngine.expect`.
    """

    wakes_thread, gathers, of_objects = True, False, False
    awaited_since: float | None = None
    ticket: Ticket | None = None
    stream = ""

    def __init__(self, work: Steps[T_co] | Pipelined, engine: "ProgressEngine") -> None:
        self.alone = not isinstance(work, Pipelined)
        self._steps: Iterator[Any]
        if isinstance(work, Pipelined):
            self._steps, self._max_in_flight, self.latency_bound = work
        else:
            self._steps, self._max_in_flight, self.latency_bound = work, 0, True
        self.engine = engine
        self._test: Test | None = None
        self.passed = 0  # tests so far
        self._unstarted: Iterator[NumberedChunk] = iter(())
        self._next: NumberedChunk | None = None  # the first unstarted chunk
        self._first = True  # no chunk has started yet
        self.all_started = self.alone
        # Chunks in flight and the test that each waits for, in the order of their numbers.
        self.in_flight: list[tuple[NumberedChunk, Test]] = []
        self.ended = False
        self._result: T_co | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []

    def call_when_done(self, function: Callable[[], object]) -> None:
        """Call a function once: in the thread that drives, when `wait` will not wait any more.

        At once if that is so already. The function must not raise, and may not wait for others.
        """
        self._callbacks.append(function)
        if self.ended or self.engine.abandoned:  # `_halt` tells after it has set that
            self.tell()

    def tell(self) -> None:
        """Call the functions of `call_when_done` that were not called yet."""
        while True:
            try:
                function = self._callbacks.pop()  # atomic: several threads may be here
            except IndexError:
                return
            function()

    def done(self) -> bool:
        """Return whether the steps have run, and let them progress; see `Work.done`."""
        self.engine.check_open()
        if not self.ended:
            self.engine.progress_in_thread([self])
        return self.ended

    def wait(self) -> T_co:
        """Block until the steps have run; return their result or raise their error. Repeatable."""
        if not self.ended:
            with self.engine.waiting():
                self.engine.drive_until(self)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # T may itself be None

    @property
    def oldest(self) -> int | None:
        """The lowest number of a chunk in flight."""
        return self.in_flight[0][0][0] if self.in_flight else None

    def advance(self, limit: float = math.inf) -> bool:
        """Pass tests that succeed, up to `limit` in all; return whether anything happened."""
        if self.ended:
            return False
        moved = False
        try:
            while self._test is None or (self.passed < limit and self._test()):
                moved = True
                self.passed += self._test is not None
                step = next(self._steps)
                if callable(step):
                    self._test = step
                else:
                    self._unstarted, self._next = step, next(step, None)
                    self.all_started = self._next is None
                    self._test = self._chunks_ended
        except StopIteration as end:
            self._result = end.value
            self._end()
        return moved

    def start_chunks(self, others: int, oldest: int | None) -> bool:
        """Start chunks as far as allowed; return whether any has started.

        `others` is the number of other collectives' chunks in flight, `oldest` the lowest number
        among them. No chunk starts while another one with the same tag is in flight. The first
        chunk starts alone, unless it has ended: other ranks on this core send their first one
        before this rank goes on.
        """
        moved = False
        while self._next and others + len(self.in_flight) < self._max_in_flight:
            lowest = self.oldest if oldest is None else oldest
            if lowest is not None and self._next[0] - lowest >= CHUNK_TAGS:
                break
            test = self._continue(self._next)
            if test is not None:
                self.in_flight.append((self._next, test))
            self._next, moved = next(self._unstarted, None), True
            self.all_started = self._next is None
            if self._first:
                self._first = False
                if self.in_flight:
                    break
        return moved

    def advance_chunks(self) -> bool:
        """Continue every chunk whose test succeeds; return whether any did.

        Each chunk tests its own messages. One test of all in flight takes less CPU time, but MPI
        makes progress only when it is called.
        """
        left, moved = list[tuple[NumberedChunk, Test]](), False
        for chunk, test in self.in_flight:
            following: Test | None = test
            if test():
                following, moved = self._continue(chunk), True
            if following is not None:
                left.append((chunk, following))
        self.in_flight = left
        return moved

    def fail(self, error: BaseException) -> None:
        """Make `wait` raise an error, and keep until the process ends what the steps hold.

        MPI and other ranks may still write to it. The steps that have raised the error are over,
        so their variables are kept.
        """
        frames = (frame for frame, _ in walk_tb(error.__traceback__))
        over = [dict(it.f_locals) for it in frames if it.f_code.co_flags & CO_GENERATOR]
        _keep(over, self._steps, self._test, self._next, *self.in_flight)
        self._error = error
        self._end()

    def _end(self) -> None:
        """Tell those that wait, and let go of the steps, which hold tensors."""
        self._steps, self._test, self.ended = iter(()), None, True
        self.tell()

    def _chunks_ended(self) -> bool:
        return self.all_started and not self.in_flight

    def _continue(self, chunk: NumberedChunk) -> Test | None:
        """Run the steps of a chunk, and return the test for which it waits; None at its end."""
        return next((test for test in chunk[1] if not test()), None)


def _keep(*kept: object) -> None:
    """Keep objects for the life of the process."""
    atexit.register(lambda *kept: None, *kept)


def steps_of(function: Callable[[], T]) -> Steps[T]:
    """Return steps that call a function and return its result."""
    yield from ()
    return function()


class _Watch(Protocol):  # a `disagreement.DisagreementWatch`
    def look(self, waits_in: str) -> Exception | None: ...
    def close(self, ticket: Ticket) -> "Steps[Exception | None]": ...


class Stream:
    """The collectives of one communicator on this rank, driven by a `ProgressEngine`.

    `name` is the same on all ranks of the communicator, and no other stream of theirs has it.
    `ranks`, if given, maps the communicator's ranks to the world's. The `observer` is told when a
    collective begins and ends; its `timeline`, if one is recorded, also whose steps run. A caller
    that waits without progress for `timeout_s` ends the job; None: after the time of the world.
    """

    def __init__(
        self, name: str, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> None:
        self.name, self.ranks = name, None if ranks is None else tuple(ranks)
        self.timeout_s = timeout_s
        self.queue: deque[Future[Any]] = deque()
        self.active: deque[Future[Any]] = deque()
        self.begun = 0
        self.digest = digest_of(name)  # of the collective that began last
        self.history: deque[Ticket] = deque(maxlen=HISTORY)
        self.observer: Recorder | None = None

    @property
    def idle(self) -> bool:
        """True if nothing is queued or active."""
        return not (self.queue or self.active)

    @property
    def submitted(self) -> int:
        """The number of collectives that have begun or are queued, of those that ranks compare."""
        return self.begun + sum(_compared(task) is not None for task in self.queue)

    @property
    def oldest(self) -> Ticket | None:
        """The ticket of the oldest collective that has begun and not finished. Thread-safe."""
        try:
            return _compared(self.active[0])
        except IndexError:
            return None

    def awaited_rank(self, ticket: Ticket) -> int | None:
        """Return the only rank of the world that a collective waits for; None if it is all."""
        signature = ticket.signature
        if signature.verb != "broadcast":
            return None
        return signature.root if self.ranks is None else self.ranks[signature.root]

    def begin(self, ticket: Ticket) -> None:
        """Number a collective that begins, and set the digest by which ranks compare it.

        It depends on the digest of the previous collective, and so on all that came before: some
        disagree unnoticed, such as two ranks that both broadcast as the root.
        """
        ticket.number = self.begun
        ticket.digest = (self.digest * SPREAD + digest_of(ticket.signature)) * SPREAD & MASK
        self.begun, self.digest = self.begun + 1, ticket.digest
        self.history.append(ticket)
        if self.observer is not None:
            awaited = self.awaited_rank(ticket)
            if awaited is None:
                awaited = -1 if self.ranks is None else -2  # all; all of the group
            text = text_of(ticket.signature)
            self.observer.collective_begins(self.name, ticket.number, text, ticket.site, awaited)
            if self.observer.timeline is not None:
                self.observer.timeline.begin(self.name, ticket)

    def progress(self) -> bool:
        """Progress everything once; return whether anything moved.

        Raises only an interrupt, such as KeyboardInterrupt: it is of the thread that drives.
        """
        try:
            began = self._begin_tasks()
            return self._advance() or began
        except BaseException as error:  # nothing is known of those behind it, either
            while self.active:
                self.active.popleft().fail(error)
            if _is_interrupt(error):
                raise
            return True

    def _begin_tasks(self) -> bool:
        """Begin what may begin; return whether anything did."""
        active, queue, began = self.active, self.queue, False
        while queue and len(active) < DEPTH:
            if active and (active[0].alone or queue[0].alone):
                break
            task = queue[0]
            if task.ticket is not None:
                self.begin(task.ticket)
            active.append(queue.popleft())
            began = True
            if not task.alone:
                task.advance(0)
        return began

    def _advance(self) -> bool:
        """Advance every active collective as far as it can go; return whether any did."""
        active, moved, may_start, oldest = self.active, False, True, None
        limit = math.inf  # tests that the collective before has passed
        in_flight = sum([len(task.in_flight) for task in active])
        timeline = None if self.observer is None else self.observer.timeline
        for task in active:
            if timeline is not None:
                timeline.enter(task.ticket)
            before = len(task.in_flight)
            if before:
                moved = task.advance_chunks() or moved
            moved = task.advance(limit) or moved
            if may_start and not task.all_started:
                moved = task.start_chunks(in_flight - before, oldest) or moved
                task.advance(limit)
            may_start = may_start and task.all_started
            oldest = task.oldest if oldest is None else oldest
            in_flight += len(task.in_flight) - before
            limit = math.inf if task.ended else task.passed
        if timeline is not None:
            timeline.enter(None)
        while active and active[0].ended:
            done = active.popleft()
            if self.observer is not None and done.ticket is not None:
                self.observer.collective_ends(self.name, done.ticket.number)
                if timeline is not None:
                    timeline.finish(done.ticket)
        return moved


def _compared(task: Future[Any]) -> Ticket | None:
    """Return the ticket of a collective that ranks compare, or None."""
    return task.ticket if task.ticket is not None and task.ticket.peers is None else None


class UnorderedStream(Stream):
    """Operations that do not wait for each other, such as messages between two ranks.

    Ranks do not compare them: their tickets have peers.
    """

    def progress(self) -> bool:
        """Progress everything once, as `Stream.progress`."""
        moved = bool(self.queue)
        while self.queue:
            self.active.append(self.queue.popleft())
        for task in tuple(self.active):
            try:
                moved = task.advance() or moved
            except BaseException as error:
                self.active.remove(task)
                task.fail(error)
                if _is_interrupt(error):
                    raise
                moved = True
        if moved:
            self.active = deque(task for task in self.active if not task.ended)
        return moved


def _is_interrupt(error: BaseException) -> bool:
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


class ProgressEngine:
    """Runs the collectives of a world, on its own thread or on a thread that waits for one.

    Collectives and functions of one stream, by default `main`, run in the order of their
    submission, which must be the same on every rank. The engine's thread progresses them while
    callers compute; a caller that waits does so itself, which saves two thread switches. Only one
    thread at a time makes MPI calls. The engine's own thread first calls `begin`.
    """

    def __init__(self, begin: Callable[[], object] = lambda: None) -> None:
        self.main = Stream("the world")
        self.streams = [self.main]
        self.watch: _Watch | None = None
        # Seconds so far in which callers waited, for gathers of small objects and for all others.
        # Threads that wait at the same time count by themselves.
        self.gathered_s = self.waited_s = 0.0
        self._counting = threading.RLock()  # a signal handler may wait, too
        self.observe: Callable[[str, float], None] = lambda name, start: None
        """Called after each wait, with a name and when it began."""
        self.device_waits: Callable[[], AbstractContextManager[object]] = nullcontext
        """Set by the clock of this rank's device, once anybody has asked for its time."""
        self.error: Exception | None = None  # by which `stop` ended all communication
        self._backoff = clock.Backoff()
        self._closed: Exception | None = None  # why nothing more is accepted
        self._abandoned = False
        self._busy_before_s = 0.0  # the part of `busy_s` before `_busy_since`
        self._busy_since: float | None = None
        self._turn = threading.Lock()  # held by the thread that progresses the collectives
        # Every caller that wants the turn: what it waits for, and since when.
        self._waiters: deque[tuple[Future[Any], float]] = deque()
        self._moved_at = 0.0  # when anything last made progress
        self._callers: set[int] = set()  # the threads that have submitted something
        self._inside: set[int] = set()  # those that have the turn or want it, before they take it
        self._begin = begin
        # Released to wake the thread, on submissions and by callers that want the turn. (An Event
        # would allocate a lock for each wait.)
        self._sleep = threading.Lock()
        self._sleep.acquire()
        self._asleep = True  # whether the thread may wait for that longer than to wake it takes
        self._gathering = False  # whether it waits for GATHER_S, for collectives that gather
        self._thread = threading.Thread(target=self._run, name="mntrain communication", daemon=True)
        self._thread.start()
        call_in_child(self._refuse_in_child)

    def add_stream(
        self, name: str, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> Stream:
        """Return a new stream; see `Stream`."""
        stream = Stream(name, ranks, timeout_s)
        stream.observer = self.main.observer
        self.streams.append(stream)
        return stream

    def submit(
        self,
        work: Steps[T] | Pipelined,
        *,
        wake: bool = True,
        gather: bool = False,
        stream: Stream | None = None,
        ticket: Ticket | None = None,
    ) -> Future[T]:
        """Queue a collective; return at once. Raises RuntimeError after `close` and `abandon`.

        Steps run when nothing else of their stream is active. Those of an `UnorderedStream` begin
        in this call, unless another thread progresses. What has no `ticket` is local, or a
        collective that is not compared.

        Without `wake`, the collective progresses, in the order of the queue, when a caller waits
        for any future of this engine, or when a later submission or `call` wakes the thread. Until
        one of these happens on every rank, the others wait. Ranks may differ in which one happens
        and when, without a deadlock, since each progresses the whole queue in the same order. A
        caller that turns to another engine wakes the thread of this one first. While the collective
        is pending, it must not wait for other ranks otherwise, for example in a blocking MPI call.

        With `gather`, the thread leaves the collective for GATHER_S to a caller that waits, with
        those of `gather` that follow: both threads would share the interpreter meanwhile.
        """
        self.check_open()
        self._turn_to()
        task: Future[T] = Future(work, self)
        stream = stream or self.main
        task.wakes_thread, task.gathers, task.stream = wake, gather, stream.name
        if ticket is not None:
            task.ticket, ticket.queued = ticket, clock.now()
        self._callers.add(threading.get_ident())
        stream.queue.append(task)
        if isinstance(stream, UnorderedStream):
            self._progress_once(stream)
        due = self._asleep or not task.latency_bound  # awake, it soon finds a short one
        if wake and due and not task.ended and not (gather and self._gathering):
            self._wake()  # which costs as much as a short collective
        return task

    def _progress_once(self, stream: Stream) -> None:
        """Progress a stream unless another thread does: a short message needs no more to be sent.

        To wake the engine's thread for it would cost more than the message.
        """
        thread = threading.get_ident()
        if thread in self._inside:
            return
        try:
            self._inside.add(thread)
            if self._turn.acquire(blocking=False):
                try:
                    self._progress([stream])
                finally:
                    self._turn.release()
        finally:
            self._inside.discard(thread)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function that runs when nothing of the main stream is active, as `submit`."""
        return self.submit(steps_of(function))

    def drive_until(self, future: Future[Any]) -> None:
        """Progress collectives until a future is done. Raises RuntimeError after `abandon`.

        Also in a signal handler that has interrupted this thread where it may have the turn.
        """
        if future.ended:
            return
        self._check_not_abandoned()
        thread = threading.get_ident()
        if thread in self._inside:
            raise RuntimeError(
                "a signal handler waits for other ranks, and has interrupted communication of this "
                "thread, which cannot go on meanwhile: let the handler set a flag, and communicate "
                "after the step, as world.stop_requested does"
            )
        self._turn_to()
        waiter = future, clock.now()
        self._waiters.append(waiter)
        try:
            self._inside.add(thread)
            if self._turn.locked():
                self._wake()
            while not self._turn.acquire(timeout=TURN_S):
                self._check_not_abandoned()
                if future.ended:  # by another caller, which still waits for its own
                    return
            try:
                self._sleep.acquire(blocking=False)
                while not future.ended:
                    self._check_not_abandoned()
                    moved = self._test_all()
                    if not future.ended:  # the result is not kept from the caller by a yield
                        self._rest(moved=moved)
            finally:
                self._turn.release()
        finally:  # also after an interrupt, the thread takes over
            self._inside.discard(thread)
            self._waiters.remove(waiter)
            if self._thread_has_work():
                self._wake()
            self.count_wait(*waiter)

    def count_wait(self, future: Future[Any], began_s: float) -> None:
        """Count the wait of the calling thread for a future. Local."""
        spent_s = clock.now() - began_s
        with self._counting:
            if future.of_objects:
                self.gathered_s += spent_s
            else:
                self.waited_s += spent_s
        self.observe("wait", began_s)

    def waiting(self) -> AbstractContextManager[object]:
        """Return the context of a wait, in which the clock of this rank's device measures it."""
        return self.device_waits()

    def progress_in_thread(self, futures: Iterable[Future[Any]]) -> None:
        """Let the engine's thread progress futures while nobody waits for them. Local."""
        asleep = [future for future in futures if not future.wakes_thread]
        for future in asleep:
            future.wakes_thread = True
        if asleep:  # it was not woken for them yet
            self._wake()

    def progress_all_in_thread(self) -> None:
        """Let the engine's thread progress all that is pending, until it is done. Local."""
        self._wake()

    def expect(self, futures: Iterable[Future[Any]]) -> None:
        """Let pending futures count as waited for from now on, and progress. Local.

        For those that are waited for in code that cannot call `wait`, such as C++ with a future of
        torch: the watchdog sees these waits, too.
        """
        futures = list(futures)
        for future in futures:
            future.awaited_since = clock.now()
        self.progress_in_thread(futures)

    def finish(self, ticket: Ticket) -> Future[None]:
        """Finish what is queued, on all ranks; nothing may be queued after. Collective.

        The future raises the error of ranks that have called anything unlike in any stream, which
        ends all communication: a broadcast waits for no other rank on its root.
        """

        def steps() -> Steps[None]:
            others = self.streams[1:]
            yield lambda: all(stream.idle for stream in others)
            for stream in others:  # no other collective follows on this rank
                stream.begin(replace(ticket))
            if self.watch is not None:
                error = yield from self.watch.close(ticket)
                if error is not None:
                    self.stop(error)
                    raise error

        return self.submit(steps(), ticket=ticket)

    def close(self) -> None:
        """Finish what is queued here and end the thread. Local."""
        if not self._abandoned:
            self.call(lambda: None).wait()
            self._closed = RuntimeError(
                "this world is closed: no communication after its `with` block"
            )
        self._wake()
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

    def awaited(self) -> tuple[Stream, float, Ticket | None] | None:
        """Return the stream for which a caller waits, and when the wait began or anything moved.

        The third is the ticket of that for which it waits. A future of `expect` counts where no
        caller waits in `wait`. None if there is none either. Thread-safe.
        """
        waits = list(self._waiters) or self._expected()
        if not waits:
            return None
        future, since = waits[0]
        stream = next(stream for stream in self.streams if stream.name == future.stream)
        return stream, max(since, self._moved_at), future.ticket

    def _expected(self) -> list[tuple[Future[Any], float]]:
        """Return the pending futures of `expect`, and since when; of a stream, the oldest first."""
        if self._abandoned:
            return []
        return [(it, it.awaited_since) for it in self._tasks() if it.awaited_since is not None]

    @property
    def busy_s(self) -> float:
        """Seconds so far in which a collective was active."""
        since = self._busy_since
        return self._busy_before_s + (clock.now() - since if since is not None else 0.0)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it is woken already
            self._sleep.release()

    def _turn_to(self) -> None:
        """Wake the thread of the engine that the calling thread leaves for this one."""
        last = getattr(_caller, "engine", None)
        if last is not self:
            _caller.engine = self
            if last is not None:
                last._wake()

    def _halt(self, error: Exception) -> None:
        """Refuse all uses, and keep the tensors of pending collectives until the process ends."""
        self._closed = self._closed or error
        self._abandoned = True
        _keep(*self.streams)
        for task in tuple(self._tasks()):
            task.tell()
        self._wake()

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
        self._begin()
        while not self._closed:
            self._asleep = True
            if self._waiters or not self._thread_has_work():  # else it came before `_asleep`
                self._sleep.acquire()
            if self._all_gather():
                self._gathering = True
                self._sleep.acquire(timeout=GATHER_S)
                self._gathering = False
                if self._waiters:
                    continue
            self._asleep = False
            with self._turn:
                self._sleep.acquire(blocking=False)
                while not (self.idle or self._waiters or self._abandoned):
                    self._rest(moved=self._test_all())

    def _tasks(self) -> Iterator[Future[Any]]:
        return (task for s in self.streams for task in (*s.active, *s.queue))

    def _thread_has_work(self) -> bool:
        return any(task.wakes_thread for task in self._tasks())

    def _all_gather(self) -> bool:
        """Return whether there is something to do, and all of it gathers."""
        tasks = list(self._tasks())
        return bool(tasks) and all(task.gathers for task in tasks)

    def _test_all(self) -> bool:
        """Progress everything once; return whether anything moved. Look for ranks that disagree."""
        moved = self._progress(self.streams)
        if not moved and self.watch is not None and self._backoff.waited_s > STALL_S:
            error = self.watch.look(self._waits_in())
            if error is not None:
                self.stop(error)
        return moved

    def _progress(self, streams: Iterable[Stream]) -> bool:
        """Progress some streams once; return whether anything moved, and note it.

        Not in the inference mode of a caller: other threads could not write to tensors of it.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False):
                return self._progress(streams)
        if self._busy_since is None:
            self._backoff.begin()
        moved = False
        for stream in streams:
            if stream.queue or stream.active:
                moved = stream.progress() or moved
        if moved:
            now, busy = clock.now(), any(stream.active for stream in self.streams)
            if busy and self._busy_since is None:
                self._busy_since = now
            elif not busy and self._busy_since is not None:
                self._busy_before_s, self._busy_since = self.busy_s, None
            self._backoff.reset()
            self._moved_at = now
        return moved

    def _waits_in(self) -> str:
        """Return the stream for which the only thread that uses this engine waits, or ""."""
        callers = [t for t in threading.enumerate() if t.ident in self._callers]
        return self._waiters[0][0].stream if len(callers) == len(self._waiters) == 1 else ""

    def _rest(self, *, moved: bool) -> None:
        """Give up the core: for a moment after progress, else until the next test is due."""
        active = [task for stream in self.streams for task in stream.active]
        if moved and (self._backoff.quick or all(task.alone for task in active)):
            if not all(task.alone for task in active):
                clock.pause(0)
        elif not self._waiters:
            delay_s = self._backoff.delay(clock.BACKGROUND)
            self._asleep = delay_s > clock.QUICK_S
            self._sleep.acquire(timeout=delay_s)
            self._asleep = False
        elif all(task.latency_bound for task in active):
            clock.pause(self._backoff.delay(clock.LATENCY_BOUND))
        else:
            clock.pause(self._backoff.delay(clock.BANDWIDTH_BOUND))
