"""The part of the watchdog on ranks 0 and 1: finds out who waits for whom, and who was lost."""

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from mntrain.watchdog import diagnosis
from mntrain.watchdog.inquiry import Inquiry, Member
from mntrain.watchdog.rank_status import STACK_SIGNAL, RankStatus, process_state
from mntrain.watchdog.side_channel import Closed, Message, SideChannel

MONITORS = (0, 1)
TAKE_OVER_S = 5.0  # until rank 1 acts in the place of rank 0
CONNECT_S = 60.0  # until ranks without a connection are named, which try several times
EXIT_S = 5.0  # at the exit, for ranks without a connection
ANSWERED_S = 1.0  # a message of rank 0 may arrive this much before one that it has answered


class EndJob(Protocol):
    """Ends the job after the report was printed. Does not return."""

    def __call__(self, report: str, *, reason: str, status: str, code: int) -> None:
        """`reason` and `status` are for the summary."""


class Monitor:
    """A monitor of a world. Rank 0 acts; rank 1 does if rank 0 is gone, or does not answer.

    Used by one thread. `limit` and `warning_limit` are seconds without progress; without `limit`, a
    job that hangs is not ended. `own_status` returns this rank's, `warn` prints a warning.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        channel: SideChannel,
        *,
        limit: float | None,
        warning_limit: float,
        own_status: Callable[[], RankStatus],
        warn: Callable[[str], None],
        end_job: EndJob,
    ) -> None:
        self._rank, self._members, self._channel = rank, members, channel
        self._limit, self._warning_limit = limit, warning_limit
        self._own_status, self._warn, self._end_job = own_status, warn, end_job
        self.left: set[int] = set()  # ranks that have left, or have told that they failed
        self._connected: set[int] = set()  # at any time so far
        self._failed: set[int] = set()  # ranks that wait until the others have left
        self._at_exit: set[int] = set()  # ranks at the exit, or not waited for there
        self._closed: set[int] = set()  # ranks whose watchdogs have ended
        self._elsewhere: set[int] = set()  # those of them that may train on in another world
        self._gone: set[int] = set()  # ranks that have ended since they left, but not MPI
        self._exit_since: float | None = None  # when this rank came there
        self.all_at_exit: Message | None = None
        """The message to ranks at the exit once no more are waited for."""
        self._inquiry: Inquiry | None = None
        self._take_over: _TakeOver | None = None  # on rank 1, while rank 0 owes an answer
        self._answered_at = {"waiting": -math.inf, "late": -math.inf}  # by rank 0
        self._quiet_until = 0.0  # other ranks tell of the same wait a moment later
        self._name_unconnected_at: float | None = time.monotonic() + CONNECT_S

    def look(self, now: float) -> None:
        """Act on what is due by the clock."""
        self._connected |= set(self._channel.peers)
        if self._connected.issuperset(range(self._rank + 1, len(self._members))):
            self._channel.stop_listening()
        if self._take_over is not None and now > self._take_over.at:
            due, self._take_over = self._take_over, None
            self._ask(ends=due.ends, reason=due.reason, code=due.code)
        if self._inquiry is not None:
            self._inquiry.note_acknowledged(self._acknowledged(self._inquiry), now)
        if self._inquiry is not None and self._inquiry.over(now):
            inquiry, self._inquiry = self._inquiry, None
            self._conclude(inquiry)
        if self._name_unconnected_at is not None and now > self._name_unconnected_at:
            self._name_unconnected_at = None
            self._name_unconnected()
        if self._rank in self._at_exit and self.all_at_exit is None:
            self._look_at_exit(now)

    def on_message(self, peer: int, message: Message) -> None:
        """Act on a message of a rank, which may be this one."""
        match message["kind"]:
            case "waiting" | "late" as kind:
                self._on_request(kind, message)
            case "answered":
                self._answered_at[message["what"]] = time.monotonic()
                self._take_over = None
            case "status" if self._inquiry is not None:
                self._inquiry.statuses[peer] = RankStatus.from_message(message["status"])
            case "left":
                self._on_left(peer)
            case "at exit" | "closed" as kind:
                if kind == "closed":
                    self._closed.add(peer)
                    self._elsewhere |= {peer} - self._at_exit
                self._at_exit.add(peer)
                self._on_left(peer)
            case "failed" if peer == message["report"]["rank"]:
                self._failed.add(peer)
                for other in set(self._channel.peers) - {peer}:
                    self._channel.send(other, message)
                self._on_left(peer)  # which the others may have done before

    def on_closed(self, peer: int, closed: Closed) -> None:
        """End the job if a rank was lost; without a limit, only warn.

        After a failure ranks end one after the other: the one that failed ends the job.
        """
        if peer in self.left - self._closed:
            self._gone.add(peer)
        if self._failed or peer in self.left or not (self._acts or peer == 0):
            return
        keys = [member.host_key for member in self._members]
        if closed.error is None:
            lost, how = [peer], "its process has ended without a word (was it killed?)"
        else:
            lost = [r for r, key in enumerate(keys) if key == keys[peer] and r not in self.left]
            how = f"the node, or the network to it, does not answer ({closed.error.strerror})"
        self._lose(lost, how)

    def _lose(self, lost: Sequence[int], how: str) -> None:
        hosts = [member.host for member in self._members]
        verb = "is" if len(lost) == 1 else "are"
        reason = f"{diagnosis.name(lost, hosts)} {verb} lost: {how}"
        if self._limit is None:
            self._warn(reason)
            return
        self._end_job(reason, reason=reason, status="lost", code=1)

    def _look_at_exit(self, now: float) -> None:
        """Let the ranks at the exit go on once no other is waited for."""
        self._exit_since = now if self._exit_since is None else self._exit_since
        missing = set(range(len(self._members))) - self._at_exit - self._gone
        if missing & self._connected or (missing and now < self._exit_since + EXIT_S):
            return
        if self._gone and self._acts:
            self._lose(sorted(self._gone), "its process has ended without the end of MPI")
        unknown = missing or self._gone or self._elsewhere
        self.all_at_exit = {"kind": "all at exit", "none_unknown": not unknown}
        for peer in self._channel.peers:
            self._channel.send(peer, self.all_at_exit)

    @property
    def _acts(self) -> bool:
        gone = 0 in self._connected and 0 not in self._channel.peers
        return self._rank == 0 or gone

    def _on_request(self, kind: str, message: Message) -> None:
        """Act if it is this rank's turn; else prepare to act unless rank 0 answers."""
        now = time.monotonic()
        if self._acts:
            if self._rank == 0:
                self._channel.send(1, {"kind": "answered", "what": kind})
            if kind == "late":
                self._ask(ends=True, reason=message["reason"], code=int(message["code"]))
            elif message["ends"] or now > self._quiet_until:
                self._ask(ends=bool(message["ends"]))
        elif now > max(self._answered_at[kind] + ANSWERED_S, self._quiet_until):
            due = self._take_over or _TakeOver(now + TAKE_OVER_S)
            due.ends |= kind == "late" or bool(message["ends"])
            if kind == "late":
                due.reason, due.code = message["reason"], int(message["code"])
            self._take_over = due

    def _ask(self, *, ends: bool, reason: str = "", code: int = 1) -> None:
        """Ask all ranks for their status; if they are being asked, let the answers count for it."""
        if self._inquiry is not None:
            if reason or (ends and not self._inquiry.ends):
                self._inquiry.ends, self._inquiry.code = True, code
                self._inquiry.reason = reason or self._inquiry.reason
            return
        self._inquiry = Inquiry(ends, reason, code, set(self._channel.peers), time.monotonic())
        self._inquiry.statuses[self._rank] = self._own_status()
        for peer in self._channel.peers:
            self._channel.send(peer, {"kind": "ask"})

    def _conclude(self, inquiry: Inquiry) -> None:
        """Report what the answers say, and end the job if it is to end."""
        inquiry.statuses[self._rank] = self._own_status()  # it may have gone on
        acknowledged = self._acknowledged(inquiry)
        evidence = inquiry.evidence(self._rank, self._members, self.left, acknowledged)
        headline, details = diagnosis.headline(evidence), diagnosis.details(evidence)
        limit = self._limit if inquiry.ends else self._warning_limit
        waited = [s.wait.seconds for s in inquiry.statuses.values() if s.wait is not None]
        if inquiry.reason:
            headline = f"{inquiry.reason}; {headline}" if waited else inquiry.reason
        elif evidence.networks and waited and not inquiry.ends:
            pass  # told early
        elif limit is None or max(waited, default=0.0) < limit:
            return  # it has gone on meanwhile
        at_exit = diagnosis.at_exit(evidence)
        if at_exit and not diagnosis.find_culprits(evidence)[1] and not inquiry.reason:
            return  # all have come meanwhile
        debugged = any(status.debugged for status in inquiry.statuses.values())
        if not inquiry.ends or (debugged and not inquiry.reason):
            end = ""
            if self._limit and not at_exit:
                end = f"\n  the job ends after {self._limit:g} s (--comm.timeout)"
            self._warn(f"{headline}\n{details}{end}")
            self._quiet_until = time.monotonic() + self._warning_limit
            return
        self._print_stacks_of_held(inquiry)
        report = f"{headline}\n{details}\n{diagnosis.stacks(evidence)}"
        self._end_job(report, reason=headline, status="stalled", code=inquiry.code)

    def _acknowledged(self, inquiry: Inquiry) -> set[int]:
        return {rank for rank in inquiry.asked if self._channel.acknowledged(rank)}

    def _print_stacks_of_held(self, inquiry: Inquiry) -> None:
        """Let ranks that run but do not answer print their stacks, on order of a neighbour."""
        for rank in inquiry.asked - inquiry.statuses.keys():
            member = self._members[rank]
            near = [r for r in inquiry.statuses if self._members[r].sees(member)]
            if self._rank in near:
                print_stack(member.pid)
            elif near:
                self._channel.send(near[0], {"kind": "stack", "pid": member.pid})

    def _on_left(self, peer: int) -> None:
        self.left.add(peer)
        if len(self.left) == len(self._members):
            for failed in self._failed:
                self._channel.send(failed, {"kind": "others left"})

    def _name_unconnected(self) -> None:
        missing = set(range(1, len(self._members))) - self._connected - self.left
        if self._rank == 0 and missing:
            hosts = sorted({self._members[rank].host for rank in missing})
            self._warn(
                f"{len(missing)} ranks on {', '.join(hosts)} have no TCP connection to rank 0: a "
                "hang or a loss there will not be explained; allow TCP between the hosts of the job"
            )


@dataclass
class _TakeOver:
    """The question that rank 1 asks in the place of rank 0, and when."""

    at: float
    ends: bool = False
    reason: str = ""
    code: int = 1


def print_stack(pid: int) -> None:
    """Let a rank of this host print its stack, if it runs: a stopped one would do so later."""
    if process_state(pid).startswith("running"):
        with suppress(OSError):
            os.kill(pid, STACK_SIGNAL)
