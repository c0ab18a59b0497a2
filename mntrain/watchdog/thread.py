"""The watchdog of a rank: a thread that finds hangs and losses, and ends the job with a report.

    on every rank       tells the monitors when it waits too long, and answers their questions
    on the monitors     ask all ranks, find out who waits for whom, and report it once

A job is ended in one way: a monitor prints its report, tells all ranks the exit code, and calls
MPI_Abort; a rank that is still there after some seconds ends itself.

The watchdog lives until the process exits. There ranks wait for each other before MPI ends, so that
collectives in flight are finished, and late and lost ranks are named.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from mntrain.alike.naming import naming
from mntrain.alike.rank_facts import RankFacts
from mntrain.comm import mpi
from mntrain.comm.engine import Future, ProgressEngine
from mntrain.comm.forked import call_in_child
from mntrain.comm.ticket import Signature, Ticket
from mntrain.recorder.events import Recorder
from mntrain.watchdog.monitor import (
    ANSWER_S,
    MONITORS,
    TAKE_OVER_S,
    Limits,
    Monitor,
    relaunch_hint,
)
from mntrain.watchdog.rank_status import (
    EXIT,
    STACK_SIGNAL,
    RankStatus,
    own_status,
    print_stack,
    unread_output,
)
from mntrain.watchdog.side_channel import Address, Message, SideChannel
from mntrain.watchdog.start_timer import limited_end
from mntrain.watchdog.unanswered import SURE_S, Connection, Unanswered, call_for, describe

ABORT_S = 5.0  # until a rank ends itself, which MPI_Abort should have ended
PRINT_S = 2.0  # for the report and the summary, of which a hung file system keeps neither back
RECONNECT_S = 10.0  # between attempts to connect to monitors
ATTEMPTS = 4
MAX_TICK_S = 1.0
REPEAT_S = 10.0  # until the end of a job that hangs is asked for again
UNHEARD = 2  # times that it is asked for in vain until a rank ends the job itself
DRAIN_S = 5.0  # at the exit, for collectives in flight
_SENDERS_S = 1.0  # in which a launcher and a scheduler may both pass on one signal
_ENDING = (signal.SIGINT, signal.SIGTERM)  # one of these ends a job that has had a signal
_of_process = WeakSet["Watchdog"]()  # those that are not closed


@dataclass
class _ExpectedSignals:
    """The signals that end a job, some seconds after the first or at the second."""

    numbers: Collection[int]
    grace_s: float
    first_at: float | None = None  # when the first has come
    end: tuple[float, str, int] | None = None  # of the job: when, why, and its exit code


class Watchdog:
    """Watches a world from a thread of its own, on one rank.

    Owns `channel`, and connects it to monitors, at `addresses` by rank. `fail` makes communication
    raise the error of a rank that has failed, whose report it gets. The `recorder` is told of a
    rank whose process has ended without a word, and tells when this one has last taken part in
    anything. A rank that waits without progress is warned of at the limit, or after SURE_S if
    another node does not answer. Time in which the awaited one waits until its output is read does
    not count. If all ranks take part in nothing until the limit of a warning, one says where they
    are; the next time it takes twice as long.
    """

    def __init__(
        self,
        rank: int,
        facts: Sequence[RankFacts],
        engine: ProgressEngine,
        limits: Limits,
        *,
        channel: SideChannel,
        addresses: Mapping[int, Address],
        fail: Callable[[Mapping[str, Any]], None],
        recorder: Recorder,
    ) -> None:
        self._rank, self._size, self._engine = rank, len(facts), engine
        self._channel, self._addresses = channel, addresses
        self._fail, self._limits = fail, limits
        self.at_end: list[Callable[[str, str], None]] = []
        """Functions that rank 0 calls, or rank 1 once rank 0 is lost, before the job ends, with the
        status and the reason of its end; by any thread. Code that appends one removes it when the
        run is over."""
        self._thread_of_training = threading.main_thread().ident or 0
        self._monitor: Monitor | None = None
        if rank in MONITORS:
            self._monitor = Monitor(
                rank,
                facts,
                channel,
                limits,
                own_status=self._own_status,
                warn=lambda text: call_for(PRINT_S, lambda: _print(f"warning: {text}")),
                end_job=self._end_job,
                pardon=self._pardon,
            )
        self._recorder, self._connect_at, self._attempts = recorder, -math.inf, 0
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()  # for the monitors
        self._left: set[int] = set()  # peers
        self._mark: tuple[str, float] | None = None  # of the current wait: the last progress
        self._stalled_s, self._told = 0.0, 0  # without progress; how urgently it was told
        self._asked_at = -math.inf  # when a monitor has asked this rank
        hosts = {rank: one.host for rank, one in enumerate(facts)}
        monitors = [r for r in MONITORS if r < len(facts)]
        self._monitors_named = naming("rank", monitors, hosts)
        self._monitors_hosts = dict.fromkeys(hosts[monitor] for monitor in monitors)
        self._early_s = channel.lost_after / 2
        self._tells_early = rank in (*monitors, _first_elsewhere(facts))
        self._unanswered = Unanswered([os.getpid()])  # connections, since the last progress
        self._active_at, self._idle_s, self._idle_limit = recorder.active_at, 0.0, limits.warn_after
        self._unread, self._unread_s = "", 0.0  # output, and the time for which it was
        self._others_left = threading.Event()
        self._left_world = self._at_exit = False  # this rank
        self._leave_told = threading.Event()
        self._all_at_exit = threading.Event()
        self._none_unknown = False  # all other ranks are known to be at the exit
        self._idle = self._all_idle = False  # nothing is pending at the exit: here, on all ranks
        self._last_call: Future[None] | None = None
        self._closed = False
        self._ending = threading.Lock()  # taken by the first that says how the run ends
        self._signals: _ExpectedSignals | None = None
        self._looked_at = time.monotonic()
        self._tick = min(
            MAX_TICK_S, limits.warn_after / 8, (limits.timeout or limits.warn_after) / 8
        )
        if hasattr(faulthandler, "register"):
            faulthandler.register(STACK_SIGNAL, file=2, all_threads=False)
        call_in_child(self._leave_to_parent)
        for other in [watchdog for watchdog in _of_process if watchdog._left_world]:
            other.close()
        _of_process.add(self)
        self._thread = threading.Thread(target=self._run, name="mntrain watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell the others not to wait for this rank at the exit, and end the thread. Local."""
        self._closed = True
        _of_process.discard(self)
        self._channel.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * ABORT_S)

    def leave_world(self) -> None:
        """Watch only the exit from here on, unless the process makes another world. Local."""
        if self.alone:
            self.close()
            return
        self.leave()
        self._left_world = True
        self._channel.wake()
        self._leave_told.wait(2 * ABORT_S)  # a process that then ends in any way is not lost

    def arrive_at_exit(self) -> None:
        """Finish the collectives in flight, and tell that this rank is at its exit. Local."""
        self._engine.progress_all_in_thread()
        deadline = time.monotonic() + DRAIN_S
        while not (self._engine.idle or self._engine.abandoned or time.monotonic() > deadline):
            time.sleep(1e-3)
        self._idle = self._engine.idle and not (self._engine.abandoned or self._left_world)
        self._at_exit = True
        self._tell({"kind": "at exit", "idle": self._idle})

    def wait_at_exit(self) -> bool:
        """Wait for the other ranks; return whether all of the job are known to be at the exit.

        Returns after the time limit in any case.
        """
        limit = threading.TIMEOUT_MAX if self._limits.timeout is None else self._limits.timeout
        self._all_at_exit.wait(min(limit, threading.TIMEOUT_MAX))
        return self._none_unknown and self._size == mpi.job_size()

    def begin_comparison(self) -> None:
        """Begin to compare the calls of all ranks, if all are at the exit. Collective."""
        if self._all_idle and not self.alone:
            self._last_call = self._engine.finish(Ticket(Signature("the end of the script"), ""))

    def end_comparison(self) -> bool:
        """Return whether ranks have called alike; rank 0 prints the error. Collective."""
        try:
            if self._last_call is not None:
                self._last_call.wait()
        except Exception as error:
            if self._rank == 0:
                _print(f"error: {error}")
            return False
        return True

    def stop_engine(self) -> bool:
        """End the communication thread if it has nothing left to do; return whether. Local."""
        if self._engine.idle and not self._engine.abandoned:
            self._engine.abandon()
        return self._engine.abandoned

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
        """Call those of `at_end` once, on one rank; an error of theirs is printed. Local."""
        first = self._ending.acquire(blocking=False)
        acts = self._monitor is not None and self._monitor.acts
        for call in [*self.at_end] if first and acts else []:
            try:
                call(status, reason)
            except Exception as error:
                _print(f"warning: the summary cannot be written: {error}")

    def lose_directory(self, reason: str) -> None:
        """End the job at once, on rank 0, with a reason but no summary: that is another job's."""
        self.at_end.clear()
        self._tell({"kind": "lost directory", "reason": reason})

    @property
    def communication_error(self) -> Exception | None:
        """The error that has ended all communication, if any."""
        return self._engine.error

    @property
    def alone(self) -> bool:
        """True in a world of one."""
        return self._size == 1

    def expect_signals(self, numbers: Collection[int], grace_s: float) -> bool:
        """End the job some seconds after one of these signals, or at the second. Local.

        It works while the main thread is held in C code, too. Returns False if it cannot, since the
        interpreter's wakeup descriptor is in use. Called by the main thread.
        """
        previous = signal.set_wakeup_fd(self._channel.wake_descriptor, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            return False
        self._signals = _ExpectedSignals(numbers, grace_s)
        return True

    def ignore_signals(self) -> None:
        """End what `expect_signals` has begun. Local."""
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
        self._signals = None

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
                for peer, message in channel.poll(self._tick):
                    self._on_message(peer, message)
                left = self._left_world
                while not self._outbox.empty():
                    self._tell_monitors(self._outbox.get())
                if left:
                    self._leave_told.set()
                self._look(time.monotonic())
                if self._at_exit and not (self._monitor or channel.peers):
                    self._all_at_exit.set()  # nobody can tell
            channel.send_to_all({"kind": "closed"})
        finally:
            channel.close()

    def _connect(self, now: float) -> None:
        """Connect to the monitors below this rank that are missing, a few times."""
        missing = [m for m in self._addresses if m < self._rank and m not in self._channel.peers]
        if not missing or self._attempts == ATTEMPTS or now < self._connect_at:
            return
        self._attempts += 1
        for monitor in missing:
            with suppress(OSError):  # tried again, and told with the report of a hang
                self._channel.connect(monitor, self._addresses[monitor])
                for kind, so_far in (("left", self._left_world), ("at exit", self._at_exit)):
                    if so_far:
                        self._channel.send(monitor, {"kind": kind, "idle": self._idle})
        self._connect_at = time.monotonic() + RECONNECT_S

    def _look(self, now: float) -> None:
        """Compare the times with their limits."""
        passed = min(now - self._looked_at, 2 * self._tick)  # less if this thread did not run
        self._looked_at = now
        self._look_at_own_wait(now, passed)
        self._look_at_output(passed)
        if self._rank == 0 and not self.alone:
            self._look_at_idleness(passed)
        signals = self._signals
        if signals is not None and signals.end is not None and now >= signals.end[0]:
            _, reason, code = signals.end
            signals.end = None
            self._tell_waiting(ends=True, reason=reason, code=code)
        if self._monitor is not None:
            self._monitor.look(now)
            if self._monitor.all_at_exit is not None:
                self._on_message(self._rank, self._monitor.all_at_exit)

    def _look_at_own_wait(self, now: float, passed: float) -> None:
        """Count the time in which this rank waits without progress, and tell it at the limits.

        Time in which this thread did not run does not count: then the process or the machine was
        stopped.
        """
        awaited = self._engine.awaited()
        at_exit = awaited is None and self._at_exit and not self._all_at_exit.is_set()
        mark = None if awaited is None else (awaited[0].name, awaited[1])
        mark = (EXIT, 0.0) if at_exit else mark
        if mark is None or mark != self._mark:
            if self._stalled_s:
                self._unanswered = Unanswered([os.getpid()])
            self._mark, self._stalled_s, self._told = mark, 0.0, 0
        else:
            self._stalled_s += passed
        if self._stalled_s > SURE_S / 4:
            self._unanswered.look(now)
        beyond, limit = -1.0, self._limit()
        if limit is not None and not at_exit:  # there, what a late rank does may take long
            beyond = self._stalled_s - limit
        warns = self._stalled_s >= self._limits.warn_after or bool(self._lost_connections())
        tells = self._tells_early and self._stalled_s >= self._early_s
        unheard = tells and self._monitor is None and self._unheard(now)
        early = tells and self._early_s < self._limits.warn_after  # otherwise it is told already
        ends = beyond >= 0
        level = 4 + int(beyond / REPEAT_S) if ends else early + unheard + warns
        if level > self._told:
            self._told = level
            self._tell_waiting(ends=ends)
            if unheard and not ends:
                self._warn_of_unheard()
            if level >= 4 + UNHEARD and self._asked_at < now - UNHEARD * REPEAT_S:
                self._end_unheard()

    def _unheard(self, now: float) -> bool:
        """Return whether no monitor has asked this rank since it waits, though it has told them."""
        late = self._stalled_s >= self._early_s + TAKE_OVER_S + ANSWER_S
        return late and self._asked_at < now - self._stalled_s

    def _warn_of_unheard(self) -> None:
        """Tell that the monitors do not answer, who would tell it of others."""
        if self._channel.peers:
            silent = "; ".join(f"no rank on {host} answers" for host in self._monitors_hosts)
            waited = f"rank {self._rank} has waited {self._stalled_s:.0f} s"
            text = f"warning: {waited}, and {self._monitors_named} do not answer; {silent}"
            call_for(PRINT_S, lambda: _print(text))

    def _end_unheard(self) -> None:
        """End the job, since no monitor does: they may be stopped, or out of reach and lost."""
        tried = self._attempts == ATTEMPTS
        if self._monitor is None and (self._channel.peers or tried):
            why = "do not answer" if self._channel.peers else "cannot be reached beside MPI"
            reason = f"rank {self._rank} has waited {self._stalled_s:.0f} s, and "
            reason += f"{self._monitors_named} {why}"
            self._end_job(reason, reason, "stalled", 1)

    def _look_at_output(self, passed: float) -> None:
        """Count the time in which nobody reads this rank's output, and tell of it afterwards."""
        unread = unread_output()
        if unread:
            self._unread, self._unread_s = unread, self._unread_s + passed
        elif self._unread_s:
            if self._unread_s >= self._limits.warn_after:
                text = (
                    f"warning: nobody has read the {self._unread} of rank {self._rank} for "
                    f"{self._unread_s:.0f} s (Ctrl-S, or a pager?): the rank may have waited in a "
                    "write, and others for it, which does not count towards --comm.timeout"
                )
                call_for(PRINT_S, lambda: _print(text))
            self._unread_s = 0.0

    def _look_at_idleness(self, passed: float) -> None:
        """Count the time in which this rank takes part in nothing; ask the others at the limit."""
        active_at, at_end = self._recorder.active_at, self._at_exit or self._left_world
        if active_at != self._active_at or at_end or self._engine.awaited() is not None:
            self._active_at, self._idle_s = active_at, 0.0
        else:
            self._idle_s += passed
        if self._idle_s >= self._idle_limit:
            self._tell_waiting(ends=False, idle_s=self._idle_s)
            self._idle_s, self._idle_limit = -math.inf, 2 * self._idle_limit  # once

    def _pardon(self) -> None:
        """Let the wait of this rank count from now on."""
        self._stalled_s, self._told = 0.0, 0

    def _limit(self) -> float | None:
        """Return the seconds without progress that end the job, of what this rank waits for."""
        awaited = self._engine.awaited()
        own_s = awaited[0].timeout_s if awaited is not None else None
        return self._limits.timeout if own_s is None else own_s

    def _lost_connections(self) -> Sequence[Connection]:
        """Return the connections without which this rank cannot go on, as far as it knows."""
        return self._unanswered.lasting() if self._stalled_s >= SURE_S else ()

    def _own_status(self) -> RankStatus:
        network, thread = describe(self._lost_connections()), self._thread_of_training
        return own_status(
            self._engine,
            thread,
            self._stalled_s,
            network,
            limit=self._limit(),
            at_exit=self._at_exit,
            idle_s=time.monotonic() - self._recorder.active_at,
        )

    def _tell_waiting(
        self, *, ends: bool, reason: str = "", code: int = 1, idle_s: float = 0.0
    ) -> None:
        content = {"ends": ends, "reason": reason, "code": code, "idle_s": idle_s}
        self._tell_monitors({"kind": "waiting", **content})

    def _tell_monitors(self, message: Message) -> None:
        for monitor in MONITORS:
            if monitor == self._rank:
                self._on_message(self._rank, message)
            else:
                self._channel.send(monitor, message)

    def _on_message(self, peer: int, message: Message) -> None:
        match message.get("kind"):
            case "disconnected":
                self._on_disconnected(peer, message["error"])
            case "signal":
                self._on_signal(int(message["number"]))
            case "ask":
                self._asked_at = time.monotonic()
                status = self._own_status()._asdict()
                self._channel.send(peer, {"kind": "status", "status": status})
            case "failed" if message["report"]["rank"] != self._rank:
                self._fail(message["report"])
                reason = "rank {rank} on {host} failed with {kind}: {message}"
                reason = reason.format(**message["report"]).partition("\n")[0]
                call_for(PRINT_S, lambda: self.end_run("crashed", reason))
            case "others left":
                self._others_left.set()
            case "output is unread":
                self._pardon()
            case "stack":
                print_stack(int(message["pid"]))
            case "end":
                self._leave_job(int(message["code"]), aborts=False)
            case "lost directory" if peer == self._rank:
                reason = str(message["reason"])
                self._recorder.job_ended(reason)
                self._end_job(reason, reason, "lost", 1)
            case "left" | "at exit" | "closed":
                self._left.add(peer)
            case "all at exit":
                self._none_unknown = bool(message["none_unknown"])
                self._all_idle = bool(message["all_idle"])
                self._all_at_exit.set()
        if self._monitor is not None and "kind" in message:
            self._monitor.on_message(peer, message)

    def _on_disconnected(self, peer: int, error: str | None) -> None:
        if self._closed:
            return
        if error is None and peer not in self._left:
            self._recorder.peer_ended(peer)
        if self._monitor is not None:
            self._monitor.on_disconnected(peer, error)
        elif peer not in self._left and not (self._channel.peers or self._left_world):
            reason = f"rank {self._rank} has lost its connections to ranks 0 and 1"
            if self._limits.timeout is None:
                call_for(PRINT_S, lambda: _print(f"warning: {reason}"))
            else:
                self._end_job(reason + relaunch_hint(), reason, "lost", 1)

    def _on_signal(self, number: int) -> None:
        """End the job some time after the first signal, or at a second one in a larger world."""
        now, signals = time.monotonic(), self._signals
        if signals is None or number not in signals.numbers:
            return
        name, code = signal.Signals(number).name, 130 if number == signal.SIGINT else 1
        if signals.first_at is None:
            signals.first_at = now
            reason = (
                f"{name} on rank {self._rank}: the step has not ended within {signals.grace_s:g} s "
                "(--run.grace, or grace of world.stop_requested)"
            )
            signals.end = now + signals.grace_s, reason, code
        elif not self.alone and number in _ENDING and now > signals.first_at + _SENDERS_S:
            code = signals.end[2] if signals.end is not None else code
            reason = f"a second signal, {name} on rank {self._rank}, ends the job at once"
            signals.end = now, reason, code

    def _end_job(self, report: str, reason: str, status: str, code: int) -> None:
        """Print a report, and end the job."""
        self._channel.send_to_all({"kind": "end", "code": code})
        call_for(PRINT_S, lambda: _print(f"error: {report}"))
        call_for(PRINT_S, lambda: self.end_run(status, reason))
        self._leave_job(code, aborts=True)

    def _leave_job(self, code: int, *, aborts: bool) -> None:
        """Abort, or be aborted; end this process if nothing else does. Does not return."""
        call_for(PRINT_S, sys.stdout.flush)
        call_for(ABORT_S, lambda: mpi.abort(code) if aborts else time.sleep(ABORT_S))
        os._exit(code)

    def _leave_to_parent(self) -> None:
        """Close the sockets in a forked child, whose signals are its own."""
        if self._signals is not None:
            with suppress(ValueError):
                signal.set_wakeup_fd(-1)
        self._closed = True
        self._channel.close(in_child=True)


def _first_elsewhere(facts: Sequence[RankFacts]) -> int | None:
    """Return the first rank that is on no host of a monitor, if there is one."""
    near = {one.host_key for one in facts[: len(MONITORS)]}
    return next((rank for rank, one in enumerate(facts) if one.host_key not in near), None)


def _print(text: str) -> None:
    print(f"mntrain: {text}", file=sys.stderr, flush=True)


@atexit.register
def _exit_together() -> None:
    """Wait for the other ranks of this process's worlds, and end MPI if all of the job are here.

    First all worlds are told: ranks may have made them in any order. Ranks whose calls have been
    unlike, which a broadcast does not show its root, end with that error. If MPI does not end
    within the time limit, this process does.
    """
    alike = [True]
    watchdogs = [watchdog for watchdog in _of_process if not watchdog._closed]
    if watchdogs and not mpi.ended():
        for watchdog in watchdogs:
            watchdog.arrive_at_exit()
        complete = [watchdog.wait_at_exit() for watchdog in watchdogs]
        for watchdog in watchdogs:
            watchdog.begin_comparison()
        alike = [watchdog.end_comparison() for watchdog in watchdogs]
        stopped = [watchdog.stop_engine() for watchdog in watchdogs]
        if any(complete) and all(stopped):
            with limited_end(watchdogs[complete.index(True)]._limits.timeout):
                mpi.finalize()
    for watchdog in watchdogs:
        watchdog.close()
    if not all(alike):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
