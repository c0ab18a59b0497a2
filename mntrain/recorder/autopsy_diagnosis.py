"""Diagnosis of a job's end from the recordings of its ranks: pure functions.

A rank stopped first if others wait in a collective that it has not begun, and it waits for nobody
itself. Where no rank is behind, the times of the last signs of life decide, and where these are
alike too, the rank whose process others saw end before they ended themselves; else nobody is named.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mntrain.recorder.autopsy_causes import explain
from mntrain.recorder.autopsy_ends import APART_S, Facts, RankEnd, Waits, end_of
from mntrain.recorder.recording import ALL_RANKS, GROUP, Event, Kind, Recording

RECENT_S = 60.0  # a file on another node may arrive that late
_TERMINATING = {"SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"}
_GOOD_ENDS = ("completed", "stopped", "preempted", "interrupted")


@dataclass(frozen=True)
class Diagnosis:
    """The end of a job, or its state. `first` stopped first, if that is known.

    `sure` says whether that is certain. If the job still runs, `first` are ranks for which others
    have waited a while. `waiting` has the collective in which each other rank waits.
    """

    state: Literal["ended well", "runs", "failed"]
    ends: Mapping[int, RankEnd]
    missing: tuple[int, ...] = ()  # ranks without a recording
    first: tuple[int, ...] = ()
    sure: bool = True
    waiting: Mapping[int, Event] = field(default_factory=dict)
    cause: str = ""
    fix: str = ""


def diagnose(recordings: Iterable[Recording], facts: Facts) -> Diagnosis:
    """Return how a job ended, from the recordings of its ranks, at least one. Pure."""
    ends = {end.header.rank: end for end in map(end_of, recordings)}
    size = next(iter(ends.values())).header.size
    missing = tuple(rank for rank in range(size) if rank not in ends)
    waits = _waits(ends)
    failed_alone = [rank for rank, end in ends.items() if _is(end, Kind.ERROR, Kind.CRASH)]
    failed = [rank for rank, end in ends.items() if end.error]
    bad_summary = facts.summary.get("status", "completed") not in _GOOD_ENDS
    if not failed and not missing and all(end.ended for end in ends.values()) and not bad_summary:
        return Diagnosis("ended well", ends)
    sure = True
    if failed_alone:
        start = min(_error_time(ends[rank]) for rank in failed_alone)
        first = [rank for rank in failed_alone if _error_time(ends[rank]) == start]
    else:
        first, sure = _find_first(ends, waits, missing, facts)
        if len(failed) == len(ends) and not missing:
            first = []
    runs = not (failed or missing) and all(_may_run(end, facts) for end in ends.values())
    if runs and not (first and sure):
        return Diagnosis("runs", ends)
    cause, fix = explain(first, ends, waits, facts, sure=sure)
    shown = {rank: events[0][0] for rank, events in waits.items() if rank not in first}
    state: Literal["runs", "failed"] = "runs" if runs else "failed"
    return Diagnosis(state, ends, missing, tuple(first), sure, shown, cause, fix)


def _waits(ends: Mapping[int, RankEnd]) -> Waits:
    """Return the collectives in which each rank waits for ranks that have not begun them."""
    waits: dict[int, list[tuple[Event, Collection[int]]]] = {}
    for rank, end in ends.items():
        for event in end.waiting:
            late = {
                other
                for other, its in ends.items()
                if other != rank and event.awaited in (ALL_RANKS, GROUP, other)
                if _not_begun(its, event)
            }
            if late and not end.ended:
                waits.setdefault(rank, []).append((event, late))
    return waits


def _not_begun(end: RankEnd, event: Event) -> bool:
    """Return True if a rank has certainly not begun a collective."""
    number = end.begun.get(event.name)
    if number is None:  # it has not used the stream; or not lately; or is not one of its ranks
        return end.recording.complete and event.awaited != GROUP
    return number < event.number


def _find_first(
    ends: Mapping[int, RankEnd], waits: Waits, missing: Sequence[int], facts: Facts
) -> tuple[list[int], bool]:
    """Return the ranks that stopped first, and whether that is certain."""
    awaited = {late for events in waits.values() for _, ranks in events for late in ranks}
    behind = sorted(awaited - waits.keys()) or sorted(awaited)
    if behind:
        silent = _earliest(ends, facts)
        both = [rank for rank in behind if rank in silent]
        certain = any(_is_stalled(ends, rank, waits, facts) for rank in both or behind)
        return both or behind, certain
    if missing:
        return list(missing), False
    unended = [rank for rank, end in ends.items() if not end.ended]
    if len(unended) < len(ends):
        return unended, True
    silent = _earliest(ends, facts)
    if 0 < len(silent) < len(ends):
        return silent, False
    seen = [e for end in ends.values() for e in end.recording.events if e.kind == Kind.PEER_ENDED]
    return [min(seen, key=lambda event: event.time).number] if seen else [], False


def _earliest(ends: Mapping[int, RankEnd], facts: Facts) -> list[int]:
    """Return the ranks without a clean end that are known to have stopped before others."""
    open_ = {rank: end for rank, end in ends.items() if not end.ended}
    for state, later in (("gone", {"runs", "stopped"}), ("stopped", {"runs"})):
        found = [rank for rank in open_ if facts.processes.get(rank) == state]
        if found and later & {facts.processes.get(rank) for rank in open_}:
            return found
    latest = max((end.last_seen for end in open_.values()), default=0.0)
    early = {rank: end.last_seen for rank, end in open_.items() if end.last_seen < latest - APART_S}
    earliest = min(early.values(), default=0.0)
    return [rank for rank, seen in early.items() if seen < earliest + APART_S]


def _is_stalled(ends: Mapping[int, RankEnd], late: int, waits: Waits, facts: Facts) -> bool:
    """Return False if a rank may be behind only because all ranks were ended at one time."""
    end, process = ends[late], facts.processes.get(late)
    for rank, events in waits.items():
        other = ends[rank]
        since = min((event.time for event, ranks in events if late in ranks), default=None)
        if since is None:
            continue
        told = _TERMINATING & set(other.signals) and not _TERMINATING & set(end.signals)
        if (
            end.ended
            or told
            or process == "stopped"
            or (process == "gone" and facts.processes.get(rank) in ("runs", "stopped"))
            or other.last_seen - since > APART_S
            or other.last_seen - end.last_seen > APART_S
        ):
            return True
    return False


def _may_run(end: RankEnd, facts: Facts) -> bool:
    process = facts.processes.get(end.header.rank)
    recent = facts.now - end.header.wall - end.last_seen < RECENT_S
    return process == "runs" or (process is None and recent and not end.ended)


def _is(end: RankEnd, *kinds: Kind) -> bool:
    return end.error is not None and end.error.kind in kinds


def _error_time(end: RankEnd) -> float:
    return end.error.time if end.error else 0.0
