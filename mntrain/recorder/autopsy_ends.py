"""The state in which the recording of a rank ends, and what else is known about the job."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from mntrain.recorder.recording import Event, Header, Kind, Recording

APART_S = 3.0  # between what happened together and what did not; a sign of life comes each second

Process = Literal["gone", "stopped", "runs"]


@dataclass(frozen=True)
class Facts:
    """Facts beside the recordings. A rank without an entry is unknown."""

    processes: Mapping[int, Process] = field(default_factory=dict)
    oom_kills: Mapping[int, int] = field(default_factory=dict)  # in its cgroup since the start
    summary: Mapping[str, Any] = field(default_factory=dict)  # summary.json
    scheduler: str = ""  # state of the job, such as OUT_OF_MEMORY
    now: float = math.inf  # seconds since the epoch


@dataclass(frozen=True)
class RankEnd:
    """The state in which a rank's recording ends."""

    recording: Recording
    begun: Mapping[str, int]  # number of the last collective of each stream
    waiting: Sequence[Event]  # collectives that have begun and are not done, the oldest first
    phase: Event | None  # the innermost; for a rank with an error, that of the error
    error: Event | None
    signals: tuple[str, ...]
    ended: bool  # cleanly

    @property
    def header(self) -> Header:
        """The facts about the rank."""
        return self.recording.header

    @cached_property
    def last_seen(self) -> float:
        """Seconds from the start of the file to the last event or sign of life."""
        events = [*self.recording.events[-1:], *filter(None, [self.recording.sign])]
        return max((event.time for event in events), default=0.0)


# The collectives in which each rank waits, and the ranks that have not begun them.
Waits = Mapping[int, Sequence[tuple[Event, Collection[int]]]]


def end_of(recording: Recording) -> RankEnd:
    """Return the state in which a recording ends."""
    begun: dict[str, int] = {}
    waiting: dict[tuple[str, int], Event] = {}
    phases: list[Event] = []
    signals: list[str] = []
    error = phase = None
    for event in recording.events:
        if event.kind == Kind.COLLECTIVE_BEGINS:
            begun[event.name] = event.number
            waiting[event.name, event.number] = event
        elif event.kind == Kind.COLLECTIVE_ENDS:
            begun[event.name] = max(event.number, begun.get(event.name, 0))
            waiting.pop((event.name, event.number), None)
        elif event.kind == Kind.PHASE_BEGINS:
            phases.append(event)
        elif event.kind == Kind.PHASE_ENDS and event.name in [open_.name for open_ in phases]:
            while phases.pop().name != event.name:
                pass
        elif event.kind == Kind.SIGNAL:
            signals.append(event.text)
        elif event.kind in (Kind.ERROR, Kind.SHARED_ERROR, Kind.CRASH) and error is None:
            error, phase = event, phases[-1] if phases else None
    ended = bool(recording.events) and recording.events[-1].kind == Kind.END
    if error is None and phases:
        phase = phases[-1]
    return RankEnd(
        recording, begun, list(waiting.values()), phase, error, tuple(signals), ended=ended
    )
