"""The watchdog of a rank: a thread that finds hangs and losses, and ends the job with a report.

    on every rank       tells the monitors when it waits too long, and answers their questions
    on the monitors     ask all ranks, find out who waits for whom, and report it once

A job ends in one way: a monitor prints its report, tells all ranks the exit code, and calls
MPI_Abort; a rank that is still there after some seconds ends itself.
"""

import atexit
import faulthandler
import math
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mntrain.comm import mpi
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.forked import call_in_child
from mntrain.watch.grace import Grace
from mntrain.watch.inquiry import Member
from mntrain.watch.monitor import MONITORS, Monitor, print_stack
from mntrain.watch.rank_status import STACK_SIGNAL, RankStatus, own_status
from mntrain.watch.side_channel import Address, Closed, Message, SideChannel
from mntrain.watch.unanswered import SURE_S, Connection, Unanswered, describe

ABORT_S = 5.0  # until a rank ends itself, which MPI_Abort should have ended
PRINT_S = 2.0  # for the report and the summary, of which a hung file system keeps neither back
RECONNECT_S = 10.0  # between attempts to connect to a monitor
ATTEMPTS = 4
MAX_TICK_S = 1.0
REPEAT_S = 10.0  # until the end of a job that hangs is asked for again


class Watchdog:
    """Watches a world from a thread of its own, on one rank.

    Owns `channel`, and connects it to the `monitors`. `fail` makes communication raise the error of
    a rank that has failed, whose report it gets. `note_end` gets a rank whose process has ended
    without a word. A rank that waits without progress is warned of after `warn_after` seconds, or
    after SURE_S if another node does not answer, and ends the job after `timeout`, if that is not
    None.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        engine: ProgressEngine,
        *,
        timeout: float | None,
        warn_after: float,
        channel: SideChannel,
        monitors: Mapping[int, Address],
        fail: Callable[[Mapping[str, Any]], None],
        note_end: Callable[[int], None],
    ) -> None:
        self._rank, self._size, self._engine = rank, len(members), engine
        self._channel, self._monitors, self._fail = channel, monitors, fail
        self._timeout, self._warn_after, self._note_end = timeout, warn_after, note_end
        self.at_end: list[Callable[[str, str], None]] = []
        """Called on rank 0 before the job ends, with the status and the reason of its end; by
        any thread. Who appends one removes it when the run is over."""
        self._thread_of_training = threading.main_thread().ident or 0
        self._monitor: Monitor | None = None
        if rank in MONITORS:
            self._monitor = Monitor(
                rank,
                members,
                channel,
                limit=timeout,
                warning_limit=warn_after,
                own_status=self._own_status,
                warn=lambda text: _call_for(PRINT_S, lambda: _print(f"warning: {text}")),
                end_job=self._end_job,
            )
        self._connect_at, self._attempts = -math.inf, 0
        self._untried: deque[tuple[int, Address]] = deque()  # monitors
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()  # for the monitors
        self._left: set[int] = set()  # peers
        self._mark: tuple[str, float] | None = None  # of the current wait: the last progress
        self._stalled_s, self._told = 0.0, 0  # without progress; how urgently it was told
        self._unanswered = Unanswered([os.getpid()])  # connections, since the last progress
        self._others_left = threading.Event()
        self._closed = False
        self._ending = threading.Lock()  # taken by the first that says how the run ends
        self._grace = Grace()
        self._looked_at = time.monotonic()
        self._tick = min(MAX_TICK_S, warn_after / 8, (timeout or warn_after) / 8)
        if hasattr(faulthandler, "register"):
            faulthandler.register(STACK_SIGNAL, file=2, all_threads=False)
        call_in_child(self._leave_to_parent)
        self._thread = threading.Thread(target=self._run, name="mntrain watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a process that ends so is not lost

    def close(self) -> None:
        """Tell the other ranks that this one leaves the world, and end the thread. Local."""
        self._closed = True
        atexit.unregister(self.close)
        self._channel.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * ABORT_S)

    def tell_failure(self, report: Mapping[str, Any]) -> None:
        """Let all other ranks raise an error with this rank's report; wait until they have left.

        Local. Returns after ABORT_S in any case.
        """
        if self._size > 1 and not self._closed:
            self._tell({"kind": "failed", "report": dict(report)})
            self._others_left.wait(ABORT_S)

    def leave(self) -> None:
        """Tell the others that this rank will be of no more use. Local."""
        self._tell({"kind": "left"})

    def end_run(self, status: str, reason: str) -> None:
        """Call those of `at_end` on rank 0, once; an error of theirs is printed. Local."""
        first = self._ending.acquire(blocking=False)
        for call in [*self.at_end] if first and self._rank == 0 else []:
            try:
                call(status, reason)
            except Exception as error:
                _print(f"warning: the summary cannot be written: {error}")

    def lose_directory(self, reason: str) -> None:
        """End the job at once, on rank 0, with a reason but no summary: that is another job's."""
        self.at_end.clear()
        self._tell({"kind": "lost directory", "reason": reason})

    @property
    def alone(self) -> bool:
        """True in a world of one."""
        return self._size == 1

    def expect_signals(self, numbers: Collection[int], grace_s: float, option: str) -> bool:
        """End the job some seconds after one of these signals, or at the second. Local.

        `option` is what the user sets the seconds with. It works while the main thread is held in C
        code, too. Returns False if it cannot, since the interpreter's wakeup descriptor is in use.
        Called by the main thread.
        """
        previous = signal.set_wakeup_fd(self._channel.wake_descriptor, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            return False
        self._grace = Grace(frozenset(numbers), grace_s, second_ends=not self.alone, option=option)
        return True

    def ignore_signals(self) -> None:
        """End what `expect_signals` has begun. Local."""
        if self._grace.numbers:
            signal.set_wakeup_fd(-1)
        self._grace = Grace()

    def _tell(self, message: Message) -> None:
        """Let the thread send a message to the monitors."""
        self._outbox.put(message)
        self._channel.wake()

    # All below runs on the thread.

    def _run(self) -> None:
        channel = self._channel
        try:
            while not self._closed:
                self._connect(time.monotonic())
                for peer, message in channel.poll(0 if self._untried else self._tick):
                    if isinstance(message, Closed):
                        self._on_closed(peer, message)
                    else:
                        self._on_message(peer, message)
                while not self._outbox.empty():
                    self._tell_monitors(self._outbox.get())
                self._look(time.monotonic())
            channel.send_to_all({"kind": "left"})
        finally:
            channel.close()

    def _connect(self, now: float) -> None:
        """Connect to the next monitor below this rank that is missing, in a few rounds."""
        if not self._untried:
            missing = [m for m in self._monitors if m < self._rank and m not in self._channel.peers]
            if not missing or self._attempts == ATTEMPTS or now < self._connect_at:
                return
            self._attempts += 1
            self._untried += [(m, self._monitors[m]) for m in missing]
        if self._untried:
            monitor, where = self._untried.popleft()
            if monitor not in self._channel.peers:
                with suppress(OSError):  # rank 0 names those that it does not hear of
                    self._channel.connect(monitor, where)
        self._connect_at = time.monotonic() + RECONNECT_S

    def _look(self, now: float) -> None:
        """Compare the times with their limits."""
        self._look_at_own_wait(now)
        if self._grace.over(now):
            reason, self._grace.deadline = self._grace.reason, None
            code = 130 if self._grace.interrupt else 1
            self._tell_monitors({"kind": "late", "reason": reason, "code": code})
        if self._monitor is not None:
            self._monitor.look(now)

    def _look_at_own_wait(self, now: float) -> None:
        """Count the time in which this rank waits without progress, and tell it at the limits.

        Time in which this thread did not run does not count: then the process or the machine was
        stopped.
        """
        awaited = self._engine.awaited()
        mark = None if awaited is None else (awaited[0].name, awaited[1])
        if mark is None or mark != self._mark:
            if self._stalled_s:
                self._unanswered = Unanswered([os.getpid()])
            self._mark, self._stalled_s, self._told = mark, 0.0, 0
        else:
            self._stalled_s += min(now - self._looked_at, 2 * self._tick)
        if self._stalled_s > SURE_S / 4:
            self._unanswered.look(now)
        self._looked_at = now
        beyond = -1.0 if self._timeout is None else self._stalled_s - self._timeout
        warns = self._stalled_s >= self._warn_after or bool(self._lost_connections())
        level = 2 + int(beyond / REPEAT_S) if beyond >= 0 else warns
        if level > self._told:
            self._told = level
            self._tell_monitors({"kind": "waiting", "ends": level > 1})

    def _lost_connections(self) -> Sequence[Connection]:
        """Return the connections without which this rank cannot go on, as far as it knows."""
        return self._unanswered.lasting() if self._stalled_s >= SURE_S else ()

    def _own_status(self) -> RankStatus:
        network = describe(self._lost_connections())
        return own_status(
            self._rank, self._engine, self._thread_of_training, self._stalled_s, network
        )

    def _tell_monitors(self, message: Message) -> None:
        for monitor in MONITORS:
            if monitor == self._rank:
                self._on_message(self._rank, message)
            else:
                self._channel.send(monitor, message)

    def _on_message(self, peer: int, message: Message) -> None:
        match message.get("kind"):
            case "signal":
                self._grace.arrived(int(message["number"]), self._rank)
            case "ask":
                status = self._own_status().to_message()
                self._channel.send(peer, {"kind": "status", "status": status})
            case "failed" if message["report"]["rank"] != self._rank:
                self._fail(message["report"])
                reason = "rank {rank} on {host} failed with {kind}: {message}"
                reason = reason.format(**message["report"]).partition("\n")[0]
                _call_for(PRINT_S, lambda: self.end_run("crashed", reason))
            case "others left":
                self._others_left.set()
            case "stack":
                print_stack(int(message["pid"]))
            case "end":
                self._leave_job(int(message["code"]), aborts=False)
            case "lost directory" if peer == self._rank:
                reason = str(message["reason"])
                self._end_job(reason, reason=reason, status="lost", code=1)
            case "left":
                self._left.add(peer)
        if self._monitor is not None and "kind" in message:
            self._monitor.on_message(peer, message)

    def _on_closed(self, peer: int, closed: Closed) -> None:
        if self._closed:
            return
        if closed.error is None and peer not in self._left:
            self._note_end(peer)
        if self._monitor is not None:
            self._monitor.on_closed(peer, closed)
        elif peer not in self._left and not self._channel.peers:
            reason = f"rank {self._rank} has lost its connections to ranks 0 and 1"
            if self._timeout is None:
                _print(f"warning: {reason}")
            else:
                self._end_job(reason, reason=reason, status="lost", code=1)

    def _end_job(self, report: str, *, reason: str, status: str, code: int) -> None:
        """Print a report, and end the job."""
        self._channel.send_to_all({"kind": "end", "code": code})
        _call_for(PRINT_S, lambda: _print(f"error: {report}"))
        _call_for(PRINT_S, lambda: self.end_run(status, reason))
        self._leave_job(code, aborts=True)

    def _leave_job(self, code: int, *, aborts: bool) -> None:
        """Abort, or be aborted; end this process if nothing else does. Does not return."""
        _call_for(PRINT_S, sys.stdout.flush)
        if aborts:
            threading.Thread(target=mpi.abort, args=(code,), daemon=True).start()
        time.sleep(ABORT_S)
        os._exit(code)

    def _leave_to_parent(self) -> None:
        """Close the sockets in a forked child, whose signals are its own."""
        if self._grace.numbers:
            with suppress(ValueError):
                signal.set_wakeup_fd(-1)
        self._closed = True
        self._channel.close(in_child=True)


def _call_for(seconds: float, function: Callable[[], object]) -> None:
    """Call a function in a thread of its own, and wait for some seconds at most."""

    def call() -> None:
        with suppress(Exception):
            function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def _print(text: str) -> None:
    print(f"mntrain: {text}", file=sys.stderr, flush=True)
