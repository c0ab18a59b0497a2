"""The tracks of one rank in a trace. A rank is a process with these threads.

    training          steps, phases and waits, one in another
    other threads     such as that which writes a checkpoint
    communication     collectives from begin to end; of those at a time, each has a row of its own
    within the node   of each of them, from the first message or copy of a level to the last
    between nodes

Source: Trace Event Format,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from mntrain.comm.ticket import text_of
from mntrain.rank_info import Place
from mntrain.timeline.event_log import TRAINING, Collective, EventLog, LevelUse, Span

LEVELS = {"node": "within the node", "cross": "between nodes"}
Clock: TypeAlias = Callable[[float], int]  # from a time of this rank to microseconds of the trace
Slice: TypeAlias = dict[str, Any]  # an event without its process and thread


def trace_events(log: EventLog, place: Place, clock: Clock) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank, whose log is closed. Local.

    Times are whole microseconds, so that what lies in another slice still does when they are read.
    """
    rank = {"pid": place.rank}
    on_gpu = "; times are those of the host" if place.gpu else ""
    facts = {
        "process_name": {"name": f"rank {place.rank} on {place.host}, node {place.node}"},
        "process_sort_index": {"sort_index": place.rank},
        "process_labels": {"labels": f"{place.device}{on_gpu}"},
    }
    for name, args in facts.items():
        yield {"ph": "M", **rank, "name": name, "args": args}
    tracks = [*_thread_tracks(log.spans, clock).items(), *_communication_tracks(log, clock)]
    # Unlike all other numbers: a thread with that of its process would be its main thread.
    first = 1000 * (place.rank + 1)
    for number, (name, slices) in enumerate(tracks, first):
        thread = {**rank, "tid": number}
        yield {"ph": "M", **thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", **thread, "name": "thread_sort_index", "args": {"sort_index": number}}
        for piece in slices:
            yield {"ph": "X", **thread, **piece}


def _slice(start: int, end: int, name: str, args: dict[str, Any] | None = None) -> Slice:
    return {"ts": start, "dur": end - start, "name": name} | ({"args": args} if args else {})


def _thread_tracks(spans: Iterable[Span], clock: Clock) -> dict[str, list[Slice]]:
    """Return the slices of each thread, without those that lie in one of the same name.

    The phases of a job are also seen from inside, by the optimizer.
    """
    tracks: dict[str, list[Slice]] = {TRAINING: []}
    around: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        outer = around.setdefault(span.thread, [])
        while outer and outer[-1].end <= span.start:
            outer.pop()
        if span.name not in [other.name for other in outer]:
            outer.append(span)
            piece = _slice(clock(span.start), clock(span.end), span.name)
            tracks.setdefault(span.thread, []).append(piece)
    return tracks


def _communication_tracks(log: EventLog, clock: Clock) -> Iterator[tuple[str, list[Slice]]]:
    yield from _rows("communication", [_slice_of(one, log, clock) for one in log.collectives])
    of_tensors = [one for one in log.collectives if one.ticket.signature.dtype is not None]
    for level, name in LEVELS.items():
        slices = [
            _slice(clock(use.start), clock(use.end), _name_of(one), _sent(use))
            for one in of_tensors
            if (use := one.levels.get(level))
        ]
        yield from _rows(name, slices)


def _rows(name: str, slices: Iterable[Slice]) -> Iterator[tuple[str, list[Slice]]]:
    """Yield tracks of one name, in each of which no two slices overlap."""
    rows: list[list[Slice]] = []
    for piece in sorted(slices, key=lambda piece: (piece["ts"], piece["dur"])):
        row = next((row for row in rows if row[-1]["ts"] + row[-1]["dur"] <= piece["ts"]), None)
        if row is None:
            rows.append(row := [])
        row.append(piece)
    for row in rows:
        yield name, row


def _slice_of(one: Collective, log: EventLog, clock: Clock) -> Slice:
    call, ticket = one.ticket.signature, one.ticket
    args: dict[str, Any] = {"call": text_of(call), "stream": one.stream, "number": ticket.number}
    if call.dtype is not None:
        args["bytes"] = call.bounds[-1] * call.dtype.itemsize
    args["queued_us"] = clock(one.start) - clock(ticket.queued)
    for level, use in one.levels.items():
        args |= {f"{level}_{name}": value for name, value in _sent(use).items()}
    if ticket.site:
        args["called_at"] = ticket.site
    if one.end is None:
        args["ends_after_the_timeline"] = True
    end = clock(log.end if one.end is None else one.end)
    return _slice(clock(one.start), end, _name_of(one), args)


def _name_of(one: Collective) -> str:
    call = one.ticket.signature
    return f"{call.label}: {call.verb}" if call.label else call.verb


def _sent(use: LevelUse) -> dict[str, int]:
    return {"messages": use.messages, "bytes": use.bytes}
