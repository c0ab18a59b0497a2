"""The events of a rank, and the tracks that a trace has of them."""

import threading
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from sharding import Clock

from mntrain.comm.ticket import Signature, Ticket
from mntrain.errors import AgreedError
from mntrain.rank_info import Place
from mntrain.timeline import StepTimeline, event_log
from mntrain.timeline.clocks import ClockReading, to_master
from mntrain.timeline.event_log import EventLog
from mntrain.timeline.tracks import trace_events

PLACE = Place(3, "n2", 1, 0, "cpu", 1)


@pytest.fixture
def clock(monkeypatch):
    """The time of events, in seconds; tests set it."""
    made = Clock()
    made.now = 100.0
    monkeypatch.setattr(event_log, "time", made)
    return made


def tracks(log):
    """The slices of each track by its name, with a number if it is not the first."""
    log.close()
    found = list(trace_events(log, PLACE, lambda own: round((own - 100) * 1e6)))
    assert {event["pid"] for event in found} == {3}
    names, seen = {}, Counter()
    for event in found:
        if event["name"] == "thread_name":
            seen.update([name := event["args"]["name"]])
            names[event["tid"]] = f"{name} {seen[name]}" if seen[name] > 1 else name
    slices = {name: [] for name in names.values()}
    for event in found:
        if event["ph"] == "X":
            slices[names[event["tid"]]].append(event)
    return slices


def of_bucket(clock, number, queued):
    ticket = Ticket(
        Signature("all_reduce", f"gradient bucket {number}", torch.float32, (0, 100)), "train.py:3"
    )
    ticket.queued = queued
    return ticket


def times(slices):
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in slices]


def test_phases_lie_in_steps_and_what_an_optimizer_sees_of_them_is_left_out(clock):
    log = EventLog(100)
    for name, start, end in [
        ("backward", 101, 102),  # from within
        ("reduce_wait", 102, 103),
        ("backward", 100.5, 103),
        ("optimizer", 103, 104),
        ("step 7", 99, 104),  # it began before
    ]:
        clock.now = end
        log.span(name, start)
    threading.Thread(target=log.span, args=("write", 103.5), name="saver").start()
    slices = tracks(log)
    assert times(slices["training"]) == [
        ("step 7", 0, 4_000_000),
        ("backward", 500_000, 3_000_000),
        ("reduce_wait", 2_000_000, 3_000_000),
        ("optimizer", 3_000_000, 4_000_000),
    ]
    assert times(slices["saver"]) == [("write", 3_500_000, 4_000_000)]


def test_a_collective_has_its_bytes_by_level_and_its_call(clock):
    log = EventLog(100)
    log.sent("node", 5, 1)  # of no collective
    first, second = of_bucket(clock, 0, 100.5), of_bucket(clock, 1, 100.6)
    clock.now = 101.0
    log.begin("optimizer 1", first)
    log.enter(first)
    clock.now = 101.5  # the sum in shared memory has taken half a second
    log.sent("node", 400, 0)
    log.sent("cross", 200, 1)
    arrived = log.in_flight("cross")
    clock.now = 102.0
    log.begin("optimizer 1", second)
    log.enter(second)
    log.sent("cross", 100, 2)
    log.enter(None)
    clock.now = 103.0
    arrived()
    log.finish(first)
    log.finish(of_bucket(clock, 2, 0))  # begun before the timeline
    log.span("backward", 100.0)
    clock.now = 104.0
    slices = tracks(log)
    assert times(slices["communication"]) == [
        ("gradient bucket 0: all_reduce", 1_000_000, 3_000_000)
    ]
    assert times(slices["communication 2"]) == [
        ("gradient bucket 1: all_reduce", 2_000_000, 4_000_000)
    ]
    assert slices["communication"][0]["args"] == {
        "call": "gradient bucket 0: all_reduce of 100 float32",
        "stream": "optimizer 1",
        "number": 0,
        "bytes": 400,
        "queued_us": 500_000,
        "node_messages": 0,
        "node_bytes": 400,
        "cross_messages": 1,
        "cross_bytes": 200,
        "called_at": "train.py:3",
    }
    assert slices["communication 2"][0]["args"]["ends_after_the_timeline"]
    assert times(slices["within the node"]) == [
        ("gradient bucket 0: all_reduce", 1_000_000, 1_500_000)
    ]
    assert times(slices["between nodes"]) == [
        ("gradient bucket 0: all_reduce", 1_500_000, 3_000_000)
    ]
    assert times(slices["between nodes 2"]) == [
        ("gradient bucket 1: all_reduce", 2_000_000, 2_000_000)
    ]


def test_no_two_slices_of_a_row_overlap(clock):
    log = EventLog(100)
    tickets = [of_bucket(clock, number, 100.0) for number in range(9)]
    for now in range(12):
        clock.now = 101.0 + now
        if now < 9:
            log.begin("stream", tickets[now])
        if now >= 3:
            log.finish(tickets[(now - 3) * 4 % 9])
    slices = tracks(log)
    rows = [row for name, row in slices.items() if name.startswith("communication")]
    assert sum(map(len, rows)) == 9
    assert 1 < len(rows) < 9
    for row in rows:
        for (_, _, end), (_, start, _) in pairwise(times(row)):
            assert end <= start


def test_a_clock_that_is_off_and_drifts_is_that_of_rank_0():
    def own(master):
        return 5e5 + 1.0003 * master

    readings = [ClockReading(own(master), master, 0.0) for master in (1000.0, 1060.0)]
    to_rank_0 = to_master(*readings)
    for master in (1000.0, 1017.3, 1060.0, 1061.0):
        assert to_rank_0(own(master)) == pytest.approx(master, abs=1e-6)
    same = ClockReading(7.0, 3.0, 0.0)
    assert to_master(same, same)(8.0) == 4.0


def test_a_job_records_only_steps_that_its_run_has(tmp_path):
    with pytest.raises(ValueError, match="8:10: the run has 9 steps; give"):
        StepTimeline(None, tmp_path, "8:10", 9)
    StepTimeline(None, tmp_path, "8:9", 9)
    none = StepTimeline(None, tmp_path, None, 9)
    with none:
        none.before_step(1)


def test_a_timeline_that_cannot_begin_is_one_warning(tmp_path):
    warnings = []

    def refuse():
        raise AgreedError("its folder is gone", 0)

    world = SimpleNamespace(agreement=refuse, output=SimpleNamespace(warn=warnings.append))
    timeline = StepTimeline(world, tmp_path, "2:4", 9)
    for step in range(1, 7):
        timeline.before_step(step)
    assert warnings == ["its folder is gone"]
