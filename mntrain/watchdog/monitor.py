"""The part of the watchdog on ranks 0 and 1: finds out who waits for whom, and who was lost."""

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mntrain.alike.naming import by_value, naming
from mntrain.alike.rank_facts import RankFacts
from mntrain.recorder.late_ranks import Wait, find_culprits, late_ranks
from mntrain.recorder.launch_notes import VARIABLE
from mntrain.watchdog.rank_status import EXIT, RankStatus, print_stack, process_state
from mntrain.watchdog.side_channel import Message, SideChannel

MONITORS = (0, 1)
ANSWER_S = 3.0  # for the ranks to answer
UNCONNECTED = "there is no TCP connection to it"
HELD = "its node does, so its process is stopped, or held in C code"
TAKE_OVER_S = 5.0  # until rank 1 asks, too, and acts if rank 0 does not answer
EXIT_S = 5.0  # at the exit, for ranks without a connection
UNREACHED_S = 45.0  # for all ranks to connect to rank 0, which they try several times


class Limits(NamedTuple):
    """Seconds without progress, after which ranks that wait are warned of, and the job ends."""

    warn_after: float
    timeout: float | None  # None: a job that hangs is not ended


def relaunch_hint() -> str:
    """Return a line on how a job that has lost a rank is started again by itself, if it is not."""
    if VARIABLE in os.environ:
        return ""
    return "\n  `mntrain launch -- COMMAND` starts it again on the hosts left: docs/recovery.md"


def same_processes(one: RankFacts, other: RankFacts) -> bool:
    """Return whether the number of a rank's process is the same for another rank."""
    return (one.host_key, one.pid_namespace) == (other.host_key, other.pid_namespace)


@dataclass
class Inquiry:
    """One question, asked at a time `at` on the monotonic clock, or to be asked then.

    `ends`: the job ends with the answers, by exit code `code`. `reason` is empty if it is asked for
    the time that ranks have waited. `idle_s`: seconds after which it is asked since rank 0 takes
    part in nothing. `left` are ranks that have left the world or ended their script. Waits and
    what follows from them are asked for after `close` alone, when no more answers come.
    """

    facts: Sequence[RankFacts]
    left: Collection[int]
    at: float
    ends: bool = False
    reason: str = ""
    code: int = 1
    idle_s: float = 0.0
    asked: set[int] | None = None
    statuses: dict[int, RankStatus] = field(default_factory=dict)  # the answers
    silent: dict[int, str] = field(default_factory=dict)  # ranks without an answer, and why

    def over(self, now: float) -> bool:
        """Return whether all have answered, or the time is over."""
        return self.asked is not None and (
            self.asked <= self.statuses.keys() or now > self.at + ANSWER_S
        )

    def close(self, monitor: int, channel: SideChannel) -> None:
        """Note the ranks that have not answered, and why, as far as `monitor` knows.

        The node of a rank has acknowledged the question by now, or is lost.
        """
        asked = self.asked or set()
        for rank, facts in enumerate(self.facts):
            if rank in self.statuses or (rank in self.left and rank not in asked):
                continue
            if same_processes(self.facts[monitor], facts):
                why = process_state(facts.pid)
            elif rank not in asked:
                why = UNCONNECTED
            elif not channel.acknowledged(rank):
                why = "nor does its node: the link to it may be down, or the node lost"
            else:
                why = HELD
            self.silent[rank] = why

    @property
    def networks(self) -> list[str]:
        """Sentences on nodes that do not answer others, with the fix, each once."""
        found = (self.statuses[rank].network for rank in sorted(self.statuses))
        return list(dict.fromkeys(filter(None, found)))

    @cached_property
    def waits(self) -> Mapping[int, Wait]:
        """The waits of ranks. One at the exit counts only if there is no other."""
        waits = {rank: s.wait for rank, s in self.statuses.items() if s.wait is not None}
        return {r: wait for r, wait in waits.items() if wait.stream != EXIT} or waits

    @cached_property
    def culprits(self) -> set[int]:
        """The ranks for which the others wait in the end.

        There are none where every rank has begun what it waits for: then messages do not arrive. At
        the exit, those are waited for that have left the world and run on.
        """
        begun = {rank: status.begun for rank, status in self.statuses.items()}
        absent = set(self.silent) | (set() if self.at_exit else set(self.left))
        late = {rank: late_ranks(wait, begun, absent) for rank, wait in self.waits.items()}
        return find_culprits(late, {r for r, why in self.silent.items() if why == UNCONNECTED})

    @cached_property
    def silent_hosts(self) -> list[str]:
        """The hosts of awaited ranks that acknowledge messages, but of which no rank answers."""
        found, culprits = [], () if self.networks else sorted(self.culprits)  # else one may be lost
        for key in dict.fromkeys(self.facts[rank].host_key for rank in culprits):
            ranks = [r for r, one in enumerate(self.facts) if one.host_key == key]
            why = {self.silent.get(rank, "") for rank in ranks if rank not in self.left}
            if why == {HELD}:
                found.append(self.facts[ranks[0]].host)
        return found

    @property
    def at_exit(self) -> bool:
        """True if the ranks that wait are at the exit."""
        return any(wait.stream == EXIT for wait in self.waits.values())

    def name(self, ranks: Collection[int]) -> str:
        """Return ranks with their hosts in words."""
        return naming("rank", ranks, {rank: facts.host for rank, facts in enumerate(self.facts)})

    @property
    def longest_s(self) -> float:
        """The seconds of the longest wait; 0 without any."""
        return max((wait.seconds for wait in self.waits.values()), default=0.0)

    def headline(self) -> str:
        """Return who waits for whom in one line."""
        waits, culprits = self.waits, self.culprits
        have = f"{self.name(waits)} {'have' if len(waits) > 1 else 'has'}"
        have += f" waited {self.longest_s:.0f} s"
        if self.at_exit:
            have += f" at the exit for {self.name(culprits)}, which "
            have += f"{'have' if len(culprits) > 1 else 'has'} not reached the end of the job"
        elif culprits and culprits == waits.keys():
            have += " for each other" if len(culprits) > 1 else " for a message of its own"
        elif culprits:
            have += f" for {self.name(culprits)}"
            if all(self.silent.get(rank, UNCONNECTED) != UNCONNECTED for rank in culprits):
                have += f", which {'do' if len(culprits) > 1 else 'does'} not answer"
        else:
            have += " in what all ranks have begun: messages between them do not arrive"
        silent = [f"no rank on {host} answers" for host in self.silent_hosts]
        return "; ".join([have, *silent, *self.networks[:1]])

    def details(self) -> str:
        """Return in what ranks wait, and where those are that they wait for, in several lines."""
        words = {
            rank: f"in {wait}" + (f", called at {wait.site}" if wait.site else "")
            for rank, wait in self.waits.items()
            if wait.stream != EXIT
        }
        lines = [f"  {self.name(group)}: {text}" for text, group in by_value(words)]
        for rank in sorted(self.culprits - self.waits.keys()):
            lines += [f"  {line}" for line in self._describe(rank)]
        lines += [f"  {text}" for text in self.networks[1:]]
        return "\n".join(lines)

    @property
    def unread(self) -> bool:
        """True if a rank that others wait for waits itself until its output is read."""
        return any(self.statuses[rank].unread for rank in self.culprits & self.statuses.keys())

    @property
    def idle(self) -> bool:
        """True if no rank has taken part in a collective or a step for the time asked for."""
        answers = self.statuses.values()
        least = min((status.idle_s for status in answers), default=0.0)
        unread = any(status.unread for status in answers)
        return 0 < self.idle_s <= least + 2 * ANSWER_S and not (self.waits or unread or self.left)

    def idleness(self) -> str:
        """Return where all ranks are, of which none takes part in anything, in several lines."""
        lines = [f"no rank has taken a step or begun a collective for {self.idle_s:.0f} s"]
        places = {rank: status.place for rank, status in self.statuses.items()}
        for place, ranks in by_value(places):
            lines.append(f"  {self.name(ranks)}: at {place}")
            lines += [f"    {line}" for line in self.statuses[ranks[0]].stack.rstrip().splitlines()]
        lines += [f"  {self.name([r])}: does not answer: {why}" for r, why in self.silent.items()]
        lines.append("  the job goes on: a file server that hangs looks like this, or long work")
        return "\n".join(lines)

    def _describe(self, rank: int) -> list[str]:
        """Return lines about a rank for which others wait."""
        name = self.name([rank])
        if rank in self.left and not self.at_exit:
            return [f"{name}: has left the world, or ended its script"]
        if rank in self.silent:
            why = "" if self.networks else f": {self.silent[rank]}"  # an answer may be lost
            return [f"{name}: does not answer{why}"]
        status, pid = self.statuses[rank], self.facts[rank].pid
        held = ", in a debugger" if status.debugged else ""
        lines = [f"{name} (process {pid}): in no collective{held}, at {status.place}"]
        return lines + [f"  {line}" for line in status.stack.rstrip().splitlines()]

    def stacks(self) -> str:
        """Return the stacks of the training threads of ranks that wait, equal ones once."""
        texts = {rank: self.statuses[rank].stack.rstrip() for rank in self.waits}
        parts = [f"stack of {self.name(group)}:\n{text}" for text, group in by_value(texts)]
        return "\n".join(parts)


class Monitor:
    """A monitor of a world. Rank 0 acts; rank 1 does if rank 0 is gone, or does not answer.

    Used by one thread. Ranks that wait for one that has left, and so in vain, are given the
    channel's `lost_after` seconds. `own_status` returns this rank's, `warn` prints a warning, and
    `end_job` prints a report and ends the job with a reason and a status for the summary and an
    exit code. `pardon` lets this rank's wait count from now on: the rank that it waits for waits
    for a reader of its output.
    """

    def __init__(
        self,
        rank: int,
        facts: Sequence[RankFacts],
        channel: SideChannel,
        limits: Limits,
        *,
        own_status: Callable[[], RankStatus],
        warn: Callable[[str], None],
        end_job: Callable[[str, str, str, int], None],
        pardon: Callable[[], None],
    ) -> None:
        self._rank, self._facts, self._channel, self._pardon = rank, facts, channel, pardon
        self._limits, self._lost_after = limits, channel.lost_after
        self._early_s = channel.lost_after / 2  # of a wait, until hosts that are silent are told
        self._own_status, self._warn, self._end_job = own_status, warn, end_job
        self.left: set[int] = set()  # ranks that have left, or have told that they failed
        self._connected: set[int] = set()  # at any time so far
        self._failed: dict[int, Message] = {}  # what was told of ranks that wait until others left
        self._at_exit: set[int] = set()
        self._busy: set[int] = set()  # of these, ranks that cannot compare their calls
        self._closed: set[int] = set()  # ranks whose watchdogs have ended, here or in another world
        self._gone: set[int] = set()  # ranks that have ended since they left, but not MPI
        self._exit_since: float | None = None  # when this rank came there
        self.all_at_exit: Message | None = None
        """The message to ranks at the exit once no more are waited for."""
        self._inquiry: Inquiry | None = None
        self._unreached_at = time.monotonic() + UNREACHED_S  # when missing ranks are told; or never
        self._ask_at = math.inf  # whether ranks wait for those that have left
        self._quiet_until = 0.0  # other ranks tell of the same wait a moment later

    def look(self, now: float) -> None:
        """Act on what is due by the clock."""
        for peer in set(self._channel.peers) - self._connected:  # it was not told before
            for failure in self._failed.values():
                self._channel.send(peer, failure)
        self._connected |= set(self._channel.peers)
        if self._connected.issuperset(range(self._rank + 1, len(self._facts))):
            self._channel.stop_listening()
            self._unreached_at = math.inf
        elif now >= self._unreached_at and self._rank == 0:
            self._unreached_at = math.inf
            self._warn_of_unreached()
        due = now >= max(self._ask_at, self._quiet_until)
        if due and self._inquiry is None and self.acts:
            self._inquiry = Inquiry(self._facts, self.left, now)
            self._ask_at = now + self._lost_after / 4
        if (inquiry := self._inquiry) is not None:
            if inquiry.asked is None and now >= inquiry.at:
                self._ask(inquiry)
            if inquiry.over(now):
                self._inquiry = None
                self._conclude(inquiry)
        if self._rank in self._at_exit and self.all_at_exit is None:
            self._look_at_exit(now)

    def _warn_of_unreached(self) -> None:
        """Name the ranks that have not connected, with the fix."""
        hosts = {rank: facts.host for rank, facts in enumerate(self._facts)}
        missing = naming("rank", hosts.keys() - {0} - self._connected - self.left, hosts)
        self._warn(
            f"{missing} cannot reach rank 0 on {hosts[0]} beside MPI, at TCP port "
            f"{self._channel.port}: if one hangs or is lost, nobody can ask it where it is. Let "
            "firewalls pass a range of ports between the nodes, and give it as --comm.port-range "
            "(port_range= of mntrain.init)"
        )

    def on_message(self, peer: int, message: Message) -> None:
        """Act on a message of a rank, which may be this one."""
        match message["kind"]:
            case "waiting":
                self._on_waiting(message)
            case "status" if self._inquiry is not None:
                self._inquiry.statuses[peer] = RankStatus.from_message(message["status"])
            case "left" | "at exit" | "closed" as kind:
                if kind == "at exit" and not message["idle"]:
                    self._busy.add(peer)
                if kind != "left":
                    (self._closed if kind == "closed" else self._at_exit).add(peer)
                self._on_left(peer)
            case "failed" if peer == message["report"]["rank"]:
                self._failed[peer] = message
                for other in set(self._channel.peers) - {peer}:
                    self._channel.send(other, message)
                self._on_left(peer)  # which the others may have done before

    def on_disconnected(self, peer: int, error: str | None) -> None:
        """End the job if a rank was lost; without a limit, only warn.

        After a failure ranks end one after the other: the one that failed ends the job.
        """
        if peer in self.left - self._closed:
            self._gone.add(peer)
        if self._failed or peer in self.left or not (self.acts or peer == 0):
            return
        if error is None:
            self._lose([peer], "its process has ended without a word (was it killed?)")
        else:
            keys = {rank: facts.host_key for rank, facts in enumerate(self._facts)}
            lost = [r for r, key in keys.items() if key == keys[peer] and r not in self.left]
            self._lose(lost, f"the node, or the network to it, does not answer ({error})")

    def _lose(self, lost: Sequence[int], how: str) -> None:
        hosts = {rank: facts.host for rank, facts in enumerate(self._facts)}
        reason = f"{naming('rank', lost, hosts)} {'is' if len(lost) == 1 else 'are'} lost: {how}"
        if self._limits.timeout is None:
            self._warn(reason)
        else:
            self._end_job(reason + relaunch_hint(), reason, "lost", 1)

    def _look_at_exit(self, now: float) -> None:
        """Let the ranks at the exit go on once no other is waited for."""
        self._exit_since = now if self._exit_since is None else self._exit_since
        everyone = set(range(len(self._facts)))
        missing = everyone - self._at_exit - self._closed - self._gone
        reached = missing & {*self._channel.peers}
        if reached or (missing and now < self._exit_since + EXIT_S):
            return
        if self._gone and self.acts:
            self._lose(sorted(self._gone), "its process has ended without the end of MPI")
        none_unknown = self._at_exit >= everyone and not self._gone
        self.all_at_exit = {
            "kind": "all at exit",
            "none_unknown": none_unknown,
            "all_idle": none_unknown and not self._busy,
        }
        for peer in self._channel.peers:
            self._channel.send(peer, self.all_at_exit)

    @property
    def acts(self) -> bool:
        """True on rank 0, and on rank 1 once rank 0 is gone."""
        gone = 0 in self._connected and 0 not in self._channel.peers
        return self._rank == 0 or gone

    def _on_waiting(self, message: Message) -> None:
        """Prepare to ask all ranks, or let the answers count for it if they are being asked."""
        now, ends, reason = time.monotonic(), bool(message["ends"]), message["reason"]
        if now <= self._quiet_until and not ends:
            return
        if (inquiry := self._inquiry) is None:
            at = now if self.acts else now + TAKE_OVER_S
            inquiry = self._inquiry = Inquiry(self._facts, self.left, at)
        inquiry.idle_s = float(message.get("idle_s", 0.0)) or inquiry.idle_s
        if reason or (ends and not inquiry.ends):
            inquiry.ends, inquiry.code = True, int(message["code"])
            inquiry.reason = reason or inquiry.reason

    def _ask(self, inquiry: Inquiry) -> None:
        """Ask all ranks for their status."""
        inquiry.asked, inquiry.at = set(self._channel.peers), time.monotonic()
        inquiry.statuses[self._rank] = self._own_status()
        for peer in self._channel.peers:
            self._channel.send(peer, {"kind": "ask"})

    def _conclude(self, inquiry: Inquiry) -> None:
        """Report what the answers say, and end the job if it is to end."""
        if self._rank > 0 and 0 in inquiry.statuses:
            return  # rank 0 acts
        inquiry.statuses[self._rank] = self._own_status()  # it may have gone on
        inquiry.close(self._rank, self._channel)
        if not inquiry.reason and inquiry.idle:
            self._warn(inquiry.idleness())
            return
        if not inquiry.reason and inquiry.unread:
            for rank in inquiry.waits.keys() - {self._rank}:
                self._channel.send(rank, {"kind": "output is unread"})
            self._pardon()
            return
        headline, details = inquiry.headline(), inquiry.details()
        warning_limit = self._limits.warn_after
        waits = [(s.wait.seconds, s.limit) for s in inquiry.statuses.values() if s.wait is not None]
        in_vain = self._in_vain(inquiry)
        if inquiry.reason:
            headline = f"{inquiry.reason}; {headline}" if waits else inquiry.reason
        elif inquiry.at_exit and not inquiry.culprits:
            return  # all have come meanwhile
        elif in_vain or self._is_early(inquiry):
            pass
        elif not any(
            seconds >= ((math.inf if limit is None else limit) if inquiry.ends else warning_limit)
            for seconds, limit in waits
        ):
            return  # it has gone on meanwhile
        debugged = any(status.debugged for status in inquiry.statuses.values())
        ends = inquiry.ends or (in_vain and self._limits.timeout is not None)
        if not ends or (debugged and not inquiry.reason):
            end = ""
            limits = [limit for _, limit in waits if limit is not None]
            if limits and not inquiry.at_exit:
                option = "of this group"
                if min(limits) == self._limits.timeout:
                    option = "--comm.timeout, or timeout="
                end = f"\n  the job ends after {min(limits):g} s ({option})"
            self._warn(f"{headline}\n{details}{end}")
            quiet_s = inquiry.longest_s if inquiry.silent_hosts else warning_limit
            self._quiet_until = time.monotonic() + min(quiet_s, warning_limit)
            return
        self._print_stacks_of_held(inquiry)
        report = f"{headline}\n{details}\n{inquiry.stacks()}"
        self._end_job(report, headline, "stalled", inquiry.code)

    def _is_early(self, inquiry: Inquiry) -> bool:
        """Return whether a wait is told before the limit of a warning, since that may be in vain.

        Another node does not answer, or no rank of it.
        """
        silent = inquiry.silent_hosts and inquiry.longest_s >= self._early_s
        return bool(inquiry.waits and not inquiry.ends and (inquiry.networks or silent))

    def _in_vain(self, inquiry: Inquiry) -> bool:
        """Return whether ranks wait for some that have left, and whose messages would have come.

        Those that were sent before may be late by the time that a link may be silent. A long
        message may be on its way for longer.
        """
        if any(wait.may_end for wait in inquiry.waits.values()):
            return False
        culprits = inquiry.culprits
        left = bool(culprits) and culprits <= self.left and not inquiry.at_exit
        return left and inquiry.longest_s >= self._lost_after

    def _print_stacks_of_held(self, inquiry: Inquiry) -> None:
        """Let ranks that run but do not answer print their stacks, on order of a neighbour."""
        for rank in (inquiry.asked or set()) - inquiry.statuses.keys():
            facts = self._facts[rank]
            near = [r for r in inquiry.statuses if same_processes(self._facts[r], facts)]
            if self._rank in near:
                print_stack(facts.pid)
            elif near:
                self._channel.send(near[0], {"kind": "stack", "pid": facts.pid})

    def _on_left(self, peer: int) -> None:
        self.left.add(peer)
        self._ask_at = min(self._ask_at, time.monotonic() + self._lost_after)
        if len(self.left) == len(self._facts):
            for failed in self._failed:
                self._channel.send(failed, {"kind": "others left"})
