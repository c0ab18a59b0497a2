"""Threads in virtual time: one runs at a time, until it waits, and a seed says which one continues.

Each thread belongs to a rank. Waits end by what happens in the simulation: a message arrives, a
lock is released, a peer writes to shared memory, a sleep is over. Where nothing can happen any
more, the run ends at once with a `DeadlockError`.
"""

from __future__ import annotations

import heapq
import os
import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

YIELDS = 3  # pauses of no length after which a thread waits for something to happen
POLL_S = 0.5e-6  # virtual time of a test that finds nothing
FIRST_LOOK_S, LAST_LOOK_S = 10e-6, 1.0  # between looks of a thread to which nothing happens
LAST_EVENTS = 40  # in errors


class DeadlockError(RuntimeError):
    """No thread can run, and nothing is under way."""


class Stopped(BaseException):
    """The end of a thread whose simulation has ended."""


class Thread:
    """A thread of a rank, with what the library uses of `threading.Thread`."""

    def __init__(
        self,
        target: Callable[..., object],
        name: str = "",
        args: Sequence[Any] = (),
        daemon: bool = True,
        *,
        time: VirtualTime | None = None,
        rank: int | None = None,
    ) -> None:
        self.time = time or current().time
        self.rank = current().rank if rank is None else rank
        self.name, self.daemon = name, daemon
        self.go = threading.Lock()  # released for this thread to continue
        self.go.acquire()
        self.ended = False
        # Its wait: whether it waits, for what, whether all that happens to its rank ends the wait,
        # or the release of one lock; the number of the wait; and vain looks since the last event.
        self.waits = self.polls = False
        self.waits_for: Callable[[], str] = lambda: "its start"
        self.lock: Lock | None = None
        self.wait_number = self.vain_looks = 0
        # Of `take_steps`: what any thread may call in its place, and whether that has paused.
        self.step: Callable[[], bool] | None = None
        self.paused = False
        self._target = partial(target, *args)
        self._thread = threading.Thread(
            target=self._run, name=f"rank {self.rank}: {name}", daemon=True
        )

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def start(self) -> None:
        self._thread.start()
        self.time.add(self)

    def join(self, timeout: float | None = None) -> None:
        while not self.ended:
            if not self.time.wait(lambda: f"the end of thread {self.name}", timeout):
                return

    def leave(self) -> None:
        """Let the thread end, after the simulation has ended."""
        if not self.ended:
            self.go.release()
        self._thread.join()

    def _run(self) -> None:
        self.go.acquire()
        _of_thread.current = self
        try:
            if not self.time.stopping:
                self._target()
        except Stopped:
            pass
        except BaseException as error:
            self.time.error = self.time.error or error
        finally:
            self.ended = True
            self.time.end(self)


_of_thread = threading.local()


def current() -> Thread:
    """Return the simulated thread that runs."""
    found: Thread = _of_thread.current
    return found


def in_simulation() -> bool:
    """Return whether the calling thread is a simulated one."""
    return hasattr(_of_thread, "current")


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Let the calling thread, and those that it starts, run on one core, another in each worker.

    One of them runs at a time, and to wake one on another core takes several times as long. They
    are told of all cores, as ranks are that are processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    worker = os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw")
    with mock.patch.object(os, "sched_getaffinity", return_value={*cores}):
        os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)


# What is to happen: at which time, a random number that orders those of one time, another that
# makes it unique, and a function; of a look, also the thread and the number of its wait.
Event = tuple[float, float, int, Callable[[], None], tuple[Thread, int] | None]


class VirtualTime:
    """The time, the events to come, and the threads of one simulation.

    `switches` is the share of uses of locks and of MPI after which another thread may continue.
    `patience_s` is the virtual time without any event that is no deadlock, for threads that act
    when nothing happens. With `keep`, `trace` has all events, and otherwise the last ones.
    `describe` says what ranks wait for, in errors. `change_rank` is called when another rank's turn
    begins, and with None at the end.
    """

    def __init__(
        self, seed: int, *, switches: float = 0.1, patience_s: float = 20.0, keep: bool = False
    ) -> None:
        self.seed, self.now, self.random = seed, 0.0, random.Random(seed)
        self.switches, self.patience_s = switches, patience_s
        self.busy_until: Counter[int] = Counter()  # the CPU of each rank
        self.lost: set[int] = set()  # ranks
        self.threads: defaultdict[int, list[Thread]] = defaultdict(list)  # by rank
        self.trace: deque[tuple[Any, ...]] = deque(maxlen=None if keep else LAST_EVENTS)
        self.describe: Callable[[], list[str]] = list
        self.change_rank: Callable[[int | None], None] = lambda rank: None
        self._turn: int | None = None  # the rank that has it
        self.error: BaseException | None = None
        self.stopping = False
        self._main: list[Thread] = []
        self._ready: list[Thread] = []
        self._events: list[Event] = []
        self._looks = 0  # among the events
        self._numbered = 0
        self._happened_at = 0.0  # when anything last happened
        self._done = threading.Lock()
        self._done.acquire()

    # For those who simulate.

    def run(self, programs: Sequence[Callable[[], object]]) -> None:
        """Run a program for each rank to its end, and end all other threads.

        Raises DeadlockError, and the error of a thread.
        """
        with _on_one_core():
            self._run_and_end(programs)
        if self.error is not None:
            raise self.error

    def _run_and_end(self, programs: Sequence[Callable[[], object]]) -> None:
        self._main = [
            Thread(program, "program", time=self, rank=rank)
            for rank, program in enumerate(programs)
        ]
        for thread in self._main:
            thread.start()
        self._hand_over(None)
        self._done.acquire()
        self.stopping = True
        for rank, threads in self.threads.items():
            self._give_turn(rank)
            for thread in threads:
                thread.leave()
        self._give_turn(None)

    def note(self, rank: int, *words: Any) -> None:
        """Add an event to the trace."""
        self.trace.append((self.now, rank, *words))

    def at(
        self, when: float, action: Callable[[], None], look: tuple[Thread, int] | None = None
    ) -> None:
        """Call a function at a time, unless it is a look of a wait that has ended."""
        self._numbered += 1
        self._looks += look is not None
        event = when, self.random.random(), self._numbered, action, look
        heapq.heappush(self._events, event)

    def happened(self, rank: int) -> None:
        """End the waits of a rank's threads that look whether something has happened."""
        self._happened_at = self.now
        for thread in self.threads[rank]:
            thread.vain_looks = 0
            if thread.polls:
                self.wake(thread)

    def work(self, rank: int, seconds: float) -> float:
        """Let a rank's CPU work, after what it does now; return when it is done."""
        self.busy_until[rank] = max(self.busy_until[rank], self.now) + seconds
        return self.busy_until[rank]

    def lose(self, rank: int) -> None:
        """Let no thread of a rank continue ever."""
        self.note(rank, "is lost")
        self.lost.add(rank)
        self._ready = [thread for thread in self._ready if thread.rank != rank]

    # For threads.

    def local_now(self) -> float:
        """Return the time as the running thread sees it: its rank may still be at work."""
        thread = getattr(_of_thread, "current", None)
        return self.now if thread is None else max(self.now, self.busy_until[thread.rank])

    def pause(self, seconds: float) -> None:
        """Wait until something happens to this rank, and look also after ever longer times."""
        thread = current()
        if seconds == 0 and thread.vain_looks < YIELDS and thread.step is None:
            thread.vain_looks += 1
            self.work(thread.rank, POLL_S)
            self.give_way()
        else:
            thread.paused = True
            self.wait(lambda: "something to happen", seconds)

    def take_steps(self, step: Callable[[], bool]) -> None:
        """Call a function until it returns True, in whichever thread has the turn.

        So most pauses change no thread of the host. The function may pause, which waits until
        something happens, and may block otherwise in nothing.
        """
        thread = current()
        thread.step = step
        if not self._steps_of(thread):
            self._hand_over(thread)
        thread.step = None
        if self.stopping:
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Wait for a time, as one who computes does, on another core than communication."""
        thread = current()
        thread.vain_looks, thread.waits = 0, True

        def awake() -> None:
            self._happened_at = self.now
            self.wake(thread)

        self.at(self.local_now() + seconds, awake)
        self._suspend(lambda: f"the end of {seconds} s of work")

    def wait(
        self,
        what: Callable[[], str],
        seconds: float | None = None,
        lock: Lock | None = None,
        *,
        polls: bool = True,
    ) -> bool:
        """Wait until something happens to this rank, or until a lock is released if there is one.

        With `seconds` also until so much time has passed, or more if nothing happens for long;
        returns False then. A thread that does not poll waits until it is woken by name.
        """
        thread = current()
        thread.waits, thread.lock = True, lock
        thread.polls = polls and (lock is None or seconds is not None)
        found = True
        if seconds is not None:
            thread.vain_looks += polls
            longer = (
                min(FIRST_LOOK_S * 4.0 ** min(thread.vain_looks, 9), LAST_LOOK_S) if polls else 0.0
            )

            def look() -> None:
                nonlocal found
                found = False
                self.work(thread.rank, POLL_S)
                self.wake(thread)

            when = self.local_now() + max(seconds, longer)
            self.at(when, look, (thread, thread.wait_number))
        self._suspend(what)
        return found

    def may_switch(self) -> None:
        """Let another thread that can run continue before this one, now and then."""
        if self._ready and self.switches and self.random.random() < self.switches:
            self.give_way()

    def give_way(self) -> None:
        """Let threads that can run continue, this one among them."""
        thread = current()
        thread.waits = True
        self.wake(thread)
        self._suspend(lambda: "its turn")

    def wake(self, thread: Thread) -> None:
        """Let a thread that waits continue, when the CPU of its rank is free."""
        if not thread.waits or thread.rank in self.lost:
            return
        thread.waits = thread.polls = False
        thread.lock = None
        thread.wait_number += 1
        free = self.busy_until[thread.rank]
        if free > self.now:
            self.at(free, lambda: self._ready.append(thread))
        else:
            self._ready.append(thread)

    def add(self, thread: Thread) -> None:
        """Let a new thread begin."""
        self.threads[thread.rank].append(thread)
        self.note(thread.rank, "starts", thread.name)
        thread.waits = True
        self.wake(thread)

    def end(self, thread: Thread) -> None:
        """Let another thread continue after the end of one."""
        if not self.stopping:
            self.note(thread.rank, "ends", thread.name)
            self.happened(thread.rank)
            self._hand_over(None)

    # Within.

    def _suspend(self, what: Callable[[], str]) -> None:
        thread = current()
        if thread.step is not None:
            if not thread.paused:
                raise AssertionError(f"a step blocks: it waits for {what()}")
            thread.waits_for = what
            return
        if not self.stopping:
            thread.waits_for = what
            self._hand_over(thread)
        if self.stopping:
            raise Stopped

    def _hand_over(self, thread: Thread | None) -> None:
        """Let the next thread continue, and wait for the turn of this one."""
        following = self._next()
        if following is thread and thread is not None:
            return
        if following is None:
            self._done.release()
        else:
            self._give_turn(following.rank)
            following.go.release()
        if thread is not None:
            thread.go.acquire()

    def _give_turn(self, rank: int | None) -> None:
        if rank != self._turn:
            self._turn = rank
            self.change_rank(rank)

    def _next(self) -> Thread | None:
        """Advance time until a thread can run, and return it; None at the end.

        Those that take steps take them here, each until it pauses.
        """
        before = getattr(_of_thread, "current", None)
        while (following := self._runnable()) is not None and following.step is not None:
            _of_thread.current = following
            try:
                if self._steps_of(following):
                    break
            except BaseException as error:
                self.error = error
            finally:
                _of_thread.current = before
        return following

    @staticmethod
    def _steps_of(thread: Thread) -> bool:
        """Let a thread take its steps until it pauses; return whether it has taken all."""
        assert thread.step is not None
        thread.paused = False
        while not thread.paused:
            if thread.step():
                return True
        return False

    def _runnable(self) -> Thread | None:
        """Advance time until a thread can run, and return it; None at the end."""
        while not self._ready:
            if self.error or all(main.ended or main.rank in self.lost for main in self._main):
                return None
            self._drop_stale_looks()
            waited_s = self._events[0][0] - self._happened_at if self._events else 0.0
            looks_only = self._looks == len(self._events)
            if not self._events or (looks_only and waited_s > self.patience_s):
                text = self.report("no rank can go on, and no message is under way")
                self.error = DeadlockError(text)
                return None
            when, _, _, action, look = heapq.heappop(self._events)
            self._looks -= look is not None
            self.now = max(self.now, when)
            try:
                action()
            except BaseException as error:  # whichever thread is here, it is not its own
                self.error = error
        if self.error:
            return None
        place = self.random.randrange(len(self._ready)) if len(self._ready) > 1 else 0
        self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
        return self._ready.pop()

    def _drop_stale_looks(self) -> None:
        """Drop the next events as far as they are looks of waits that have ended."""
        while self._events and (look := self._events[0][4]) is not None:
            thread, number = look
            if thread.waits and thread.wait_number == number:
                return
            heapq.heappop(self._events)
            self._looks -= 1

    def report(self, title: str) -> str:
        """Return the text of an error: its seed, who waits for what, and the last events."""
        threads = [thread for rank in sorted(self.threads) for thread in self.threads[rank]]
        waits = [
            f"  rank {thread.rank}, {thread.name}: waits for {thread.waits_for()}"
            for thread in threads
            if not thread.ended
        ]
        lost = [f"  rank {rank} is lost" for rank in sorted(self.lost)]
        events = [
            f"  {when * 1e6:.2f} us, rank {rank}: {' '.join(map(str, words))}"
            for when, rank, *words in list(self.trace)[-LAST_EVENTS:]
        ]
        lines = [f"seed {self.seed}: {title}", *lost, *self.describe(), *waits]
        return "\n".join([*lines, "the last events:", *events])


class Lock:
    """A lock of the threads of one rank, with the interface of `threading.Lock`."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        time = current().time
        time.may_switch()
        while self._held:
            if not blocking:
                return False
            if not time.wait(lambda: "a lock", None if timeout < 0 else timeout, self):
                return False
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        thread = current()
        if not thread.time.stopping:
            for other in thread.time.threads[thread.rank]:
                if other.lock is self:
                    thread.time.wake(other)
            thread.time.may_switch()

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Flag:
    """An event of the threads of one rank, with the interface of `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for thread in self._waiting:
            thread.time.wake(thread)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        time, found = current().time, True
        while found and not self._set:
            self._waiting.append(current())
            found = time.wait(lambda: "an event", timeout, polls=False)
            self._waiting.remove(current())
        return self._set


class Threading:
    """The place of the module `threading` in modules of the library."""

    Thread, Lock, Event = Thread, Lock, Flag

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    @staticmethod
    def current_thread() -> Any:
        return getattr(_of_thread, "current", None) or threading.current_thread()

    @staticmethod
    def main_thread() -> Any:
        """Return the thread of the running rank's program."""
        thread = getattr(_of_thread, "current", None)
        return thread.time.threads[thread.rank][0] if thread else threading.main_thread()
