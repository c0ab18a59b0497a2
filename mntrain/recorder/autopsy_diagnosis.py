"""Diagnosis of a job's end from the recordings of its ranks: pure.

A rank stopped first if others wait in a collective that it has not begun, and it waits for nobody
itself. Where no rank is behind, the times of the last signs of life decide, and where these are
alike too, the rank whose process others saw end before they ended themselves; else nobody is named.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mntrain.recorder.late_ranks import Wait, find_culprits, late_ranks
from mntrain.recorder.recording import GROUP, JOB, MPI, Event, Kind, Recording

APART_S = 3.0  # between what happened together and what did not; a sign of life comes each second
RECENT_S = 60.0  # a file on another node may arrive that late
_TERMINATING = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"}
_GOOD_ENDS = ("completed", "stopped", "preempted", "interrupted")

_OUTPUT = (
    "look for a signal or exit code in the output of mpirun or srun, and in the kernel's log of "
    "its host (dmesg); python -X faulthandler shows where native code crashes"
)
_SAME_CALLS = "look for a call, a continue after an exception, or a loop that differs between ranks"
_SAME_STEPS = (
    "let every rank take the same number of steps: look for a break, return or exit in a branch "
    "that differs between ranks"
)
_LESS_MEMORY = (
    "use less memory: a smaller --train.micro-batch-size, --zero.stage 2, fewer data-loader "
    "workers; or ask the scheduler for more"
)
_LONGER_GRACE = (
    "run the same command again to resume; give the job more time between the signal and the kill, "
    "or end it in time with --run.max-minutes"
)
_MISSING = "give the folder with its file as a further argument, or read the output of mpirun"
_SCHEDULER = {
    "OUT_OF_MEMORY": _LESS_MEMORY,
    "TIMEOUT": "ask for more time, or let the job end in time with --run.max-minutes",
    "CANCELLED": "somebody or the scheduler cancelled it; run the same command again to resume",
    "PREEMPTED": "run the same command again to resume",
    "NODE_FAIL": "a node was lost: run the same command again to resume, without that node",
}

Process = Literal["gone", "stopped", "runs"]


@dataclass
class Autopsy:
    """The end of a job, from the recordings of its ranks, at least one, and other facts.

    A rank without a process is unknown. `first` are the ranks that stopped first, if known, and
    `sure` says whether that is certain. If the job still runs, `first` are ranks for which others
    have waited a while. `moved` are ranks whose recordings have grown while it was looked at them.
    """

    recordings: Mapping[int, Recording]  # by rank
    processes: Mapping[int, Process] = field(default_factory=dict)
    oom_kills: Mapping[int, int] = field(default_factory=dict)  # in its cgroup since the start
    summary: Mapping[str, Any] = field(default_factory=dict)  # summary.json
    scheduler: str = ""  # state of the job, such as OUT_OF_MEMORY
    now: float = math.inf  # seconds since the epoch
    moved: Collection[int] = ()
    state: Literal["ended well", "runs", "failed"] = field(init=False, default="failed")
    first: Sequence[int] = field(init=False, default=())
    sure: bool = field(init=False, default=True)
    cause: str = field(init=False, default="")
    fix: str = field(init=False, default="")

    def __post_init__(self) -> None:
        ends = self.recordings
        size = next(iter(ends.values())).header.size
        self.missing = [rank for rank in range(size) if rank not in ends]
        # The collectives in which each rank waits for others, and the ranks that are late.
        self.waits = self._find_waits()
        errors = {rank: end.error for rank, end in ends.items() if end.error}
        own = {r: e.time for r, e in errors.items() if e.kind in (Kind.ERROR, Kind.CRASH)}
        well = self.summary.get("status", "completed") in _GOOD_ENDS
        if well and not (errors or self.missing) and all(end.ended for end in ends.values()):
            self.state = "ended well"
            return
        if own:
            self.first = [rank for rank, time in own.items() if time == min(own.values())]
            if _is_interrupt(errors[self.first[0]]):  # which the launcher passes on to all ranks
                self.first, self.sure = (), False
            elif errors[self.first[0]].name == MPI:
                self.sure = False
        elif any(error.name == JOB for error in errors.values()):
            self.sure = False
        elif len(errors) < len(ends) or self.missing:
            self.first, self.sure = self._find_first()
            if self._ended_by_signal():
                self.first, self.sure = (), False
        else:
            self.sure = False  # all have the same error
        if not (errors or self.missing) and all(self._may_run(end) for end in ends.values()):
            self.state = "runs"
            if not (self.first and self.sure):
                self.first, self.sure, self.waits = (), True, {}
                return
        self.cause, self.fix = self._explain()

    def _find_waits(self) -> dict[int, list[tuple[Wait, set[int]]]]:
        ends, waits = self.recordings, {}
        unfinished = [event for end in ends.values() for event in end.unfinished.values()]
        shared = {event.name for event in unfinished if event.awaited != GROUP}
        # A rank has not begun a collective of a stream that it has not used, if all is known of it.
        begun = {
            rank: {**dict.fromkeys(shared if end.complete else (), 0), **end.begun}
            for rank, end in ends.items()
        }
        for rank, end in ends.items():
            late = [(wait, ranks) for wait in end.waits if (ranks := late_ranks(wait, begun))]
            if late and not end.ended:
                waits[rank] = late
        return waits

    def _find_first(self) -> tuple[list[int], bool]:
        """Return the ranks that stopped first, and whether that is certain."""
        ends = self.recordings
        awaited = {r: {late for _, ranks in w for late in ranks} for r, w in self.waits.items()}
        behind, silent = sorted(find_culprits(awaited)), self._earliest()
        if behind:
            behind = [rank for rank in behind if rank in silent] or behind
            late = {*behind}
            return behind, any(
                wait.seconds > APART_S
                for waits in self.waits.values()
                for wait, ranks in waits
                if ranks & late
            )
        if self.missing:
            return self.missing, False
        unended = [rank for rank, end in ends.items() if not end.ended]
        if len(unended) < len(ends):
            return unended, True
        if 0 < len(silent) < len(ends):
            return silent, False
        seen = [e for end in ends.values() for e in end.events if e.kind == Kind.PEER_ENDED]
        return [min(seen, key=lambda event: event.time).number] if seen else [], False

    def _earliest(self) -> list[int]:
        """Return the ranks without a clean end that are known to have stopped before others."""
        seen = {rank: end.last_seen for rank, end in self.recordings.items() if not end.ended}
        for state, later in (("gone", {"runs", "stopped"}), ("stopped", {"runs"})):
            found = [rank for rank in seen if self.processes.get(rank) == state]
            if found and later & {self.processes.get(rank) for rank in seen}:
                return found
        latest = max(seen.values(), default=0.0)
        early = {rank: time for rank, time in seen.items() if time < latest - APART_S}
        earliest = min(early.values(), default=0.0)
        return [rank for rank, time in early.items() if time < earliest + APART_S]

    def _ended_by_signal(self) -> bool:
        """Return whether all ranks had a signal to end before any had waited long for `first`."""
        told = [
            next((event.time for event in end.events if event.text in _TERMINATING), math.inf)
            for end in self.recordings.values()
        ]
        if max(told) == math.inf or self.missing:
            return False
        begun = [
            self.recordings[rank].last_seen - wait.seconds
            for rank, waits in self.waits.items()
            for wait, late in waits
            if late & set(self.first)
        ]
        return min(begun, default=math.inf) > min(told) - APART_S

    def _may_run(self, end: Recording) -> bool:
        """Return whether a rank may run: a recording that does not move may come late by a minute.

        Ages are by two clocks, so one below zero tells nothing.
        """
        process = self.processes.get(end.header.rank)
        if process is not None or end.ended:
            return process == "runs"
        age = self.now - end.header.wall - end.last_seen
        recent = 0 <= age < RECENT_S and not self.summary.get("status")
        return recent or end.header.rank in self.moved

    @property
    def uncertain(self) -> bool:
        """True if another look at recordings may tell whether the job runs."""
        known = self.missing or self.summary.get("status") or self.state == "ended well"
        unseen = [end for rank, end in self.recordings.items() if rank not in self.processes]
        return not known and any(not (end.ended or end.error) for end in unseen)

    @property
    def seen_running(self) -> bool:
        """True if each rank's process was seen here, or its recording moved."""
        return {*self.processes, *self.moved} >= self.recordings.keys()

    def _explain(self) -> tuple[str, str]:  # noqa: PLR0911 - one return for each cause
        """Return the likely cause, and what to do."""
        first, ends = self.first, self.recordings
        known = [ends[rank] for rank in first if rank in ends]
        if errors := [end.error for end in known or ends.values() if end.error]:
            return _explain_error(min(errors, key=lambda error: not _is_interrupt(error)))
        if killed := [str(rank) for rank in first or ends if self.oom_kills.get(rank)]:
            ranks = ", ".join(killed)
            cause = f"the kernel killed for lack of memory in the cgroup of rank {ranks}"
            return cause, _LESS_MEMORY
        if self.scheduler in _SCHEDULER:
            return f"the scheduler ended the job: {self.scheduler}", _SCHEDULER[self.scheduler]
        if not first:
            if said := self.summary.get("error") or self.summary.get("reason"):
                return str(said), _OUTPUT
            if signals := sorted({name for end in ends.values() for name in end.signals}):
                return f"the job was killed after {', '.join(signals)}", _LONGER_GRACE
            cause = "all ranks stopped at about the same time: the job was killed as a whole"
            return cause, _OUTPUT
        if set(first) <= self.waits.keys():
            return "ranks wait for each other in different collectives", _SAME_CALLS
        if not known:
            cause = "this rank ended before it could record, or its file is on another node"
            return cause, _MISSING
        if any(end.ended for end in known):
            return "it ended its program while other ranks still waited for it", _SAME_STEPS
        return self._explain_silence(known)

    def _explain_silence(self, known: Sequence[Recording]) -> tuple[str, str]:
        """Return the likely cause of an end that left no word."""
        header, processes = known[0].header, {self.processes.get(rank) for rank in self.first}
        if "stopped" in processes:
            return (
                "its process is stopped, by SIGSTOP or a debugger",
                f"on {header.host}: kill -CONT {header.pid}",
            )
        if "runs" in processes:
            return (
                "it runs, but has not called what the others wait for: it is slow, hangs, or took "
                "another branch",
                f"on {header.host}: py-spy dump --pid {header.pid}; {_SAME_CALLS}",
            )
        return (
            "its process was killed (SIGKILL), crashed, hung in native code or was stopped "
            "(SIGSTOP), its node was lost, or it was slow or took another branch until the job was "
            "killed as a whole: it noted no exception",
            f"{_OUTPUT}; {_SAME_CALLS}",
        )


def _is_interrupt(error: Event) -> bool:
    return error.text.startswith("KeyboardInterrupt")


def _explain_error(error: Event) -> tuple[str, str]:
    if error.kind == Kind.SHARED_ERROR:
        return error.text, "the whole message stands in the job's output, and says what to do"
    if error.kind == Kind.CRASH and error.name == MPI:
        return f"MPI crashed: {error.text}", (
            "MPI may crash so in a rank that sends to one which has ended just now: look for the "
            "first that ended in the launcher's output; else update the MPI library"
        )
    if error.kind == Kind.CRASH:
        return f"native code crashed: {error.text}", (
            f"look at what is called at {error.site or 'the last line'}: update the library, or "
            "report the crash to its authors"
        )
    if _is_interrupt(error):
        return "it was interrupted by Ctrl-C", "run the same command again to resume"
    if error.text.startswith("SystemExit"):
        return f"the script left the job by {error.text}", _SAME_STEPS
    return (
        f"an exception on one rank: {error.text}",
        f"correct what raises it at {error.site}; the traceback stands in the job's output",
    )
