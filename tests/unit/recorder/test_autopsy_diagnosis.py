"""Search for the rank that stopped first, in recordings written by hand."""

from dataclasses import replace

import pytest

from mntrain.recorder.autopsy import describe
from mntrain.recorder.autopsy_diagnosis import Autopsy
from mntrain.recorder.recording import ALL_RANKS, GROUP, JOB, Event, Header, Kind, Recording


def begins(time, number, stream="the world", awaited=ALL_RANKS):
    return Event(time, Kind.COLLECTIVE_BEGINS, number, awaited, stream, "all_reduce", "train.py:9")


def done(time, number, stream="the world"):
    return Event(time, Kind.COLLECTIVE_ENDS, number, name=stream)


def phase(time, name, step=1):
    return Event(time, Kind.PHASE_BEGINS, step, name=name)


def error(time, text="KeyError: 3", kind=Kind.ERROR):
    return Event(time, kind, text=text, site="train.py:4")


def end(time):
    return Event(time, Kind.END)


def sigterm(time):
    return Event(time, Kind.SIGNAL, 15, text="SIGTERM")


def recording(rank, *events, size=3, seen=None, complete=True):
    """`seen`: the time of the last sign of life."""
    header = Header(rank, size, "job", "node", 100 + rank, "1", "boot", "pids", 1000.0 + rank, 0.0)
    sign = None if seen is None else Event(seen, Kind.SIGN_OF_LIFE, site="model.py:7")
    return Recording(header, events, complete, sign)


def waits(rank, number=1, since=2.0, seen=9.0, **options):
    """A rank that has done all collectives before `number`, and waits in that one."""
    return recording(rank, begins(1, 0), done(1.1, 0), begins(since, number), seen=seen, **options)


def computes(rank, seen=9.0, *events, **options):
    """A rank that has done collective 0, and then the events."""
    return recording(rank, begins(1, 0), done(1.1, 0), *events, seen=seen, **options)


def crash(time, text="Segmentation fault"):
    return Event(time, Kind.CRASH, text=text, site="native.py:3")


def saw(time, rank):
    return Event(time, Kind.PEER_ENDED, rank)


def alike(make, *words):
    """The recordings of three ranks that differ in their number only."""
    return [make(rank, *words) for rank in range(3)]


def diagnose(recordings, **facts):
    return Autopsy({recording.header.rank: recording for recording in recordings}, **facts)


GONE, RUN = dict.fromkeys(range(3), "gone"), dict.fromkeys(range(3), "runs")
# Rank 1 is late by half a second, as in any healthy job.
LATE = [waits(0, since=8.5), computes(1), waits(2, since=8.5)]
ONE_WAITED_FOR = [waits(0), computes(1), waits(2)]
ENDED = alike(computes, 3.0, end(4))
REPLACED = Event(9, Kind.SHARED_ERROR, name=JOB, text="another folder is in its place")
SHARED = "AgreedError: in step 2, the loss is nan on rank 1"
CTRL_C = "KeyboardInterrupt: "
LOST = [begins(2, 1), error(30, "RemoteRankError: rank 1 is lost", Kind.SHARED_ERROR)]
# Each was killed within the first second: rank 2 first, and the launcher killed the others.
KILLED = [computes(0, 1.0, saw(0.7, 2), saw(0.9, 1)), computes(1, 0.9, saw(0.8, 2))]
KILLED.append(computes(2, 0.6))
OTHER = "optimizer 1"
OLD = computes(0, 9.0, begins(2, 5, "rare"), size=2)
# The recordings; other facts; the state, the ranks that stopped first, whether that is sure, and
# words of the cause and the fix.
CASES = {
    "all closed the world": (ENDED, {}, ("ended well", [], True)),
    "preempted": (ENDED, {"summary": {"status": "preempted"}}, ("ended well", [], True)),
    "NaN": (ENDED, {"summary": {"status": "failed", "error": "NaN"}}, ("failed", [], ...), "NaN"),
    "others wait for it": (ONE_WAITED_FOR, {}, ("failed", [1], True)),
    # Rank 0 waits for rank 1, which waits in another stream for rank 2.
    "who waits is not the first": (
        [
            computes(0, 9.0, begins(2, 0, OTHER), done(3, 0, OTHER), begins(4, 1)),
            computes(1, 9.0, begins(2, 0, OTHER)),
            computes(2, 9.0),
        ],
        {},
        ("failed", [2], True),
    ),
    "they wait for each other": (
        [computes(0, 9.0, begins(2, 0, OTHER)), computes(1, 9.0, begins(2, 1))],
        {},
        ("failed", [0, 1], ...),
        "wait for each other",
    ),
    "killed as a whole": (LATE, {}, ("failed", [1], False), "killed as a whole"),
    "killed as a whole, none late": (
        [waits(rank, since=8.9) for rank in range(3)],
        {},
        ("failed", [], False),
    ),
    "without the signal of the others": (
        [
            computes(0, 9.0, begins(8.5, 1), sigterm(9)),
            computes(1, 8.0),
            computes(2, 9.0, begins(8.5, 1), sigterm(9)),
        ],
        {},
        ("failed", [1], False),
    ),
    "stopped inside the collective that all have begun": (
        [waits(0, seen=40.0), waits(1, seen=3.0), waits(2, seen=40.0)],
        {},
        ("failed", [1], ...),
        "SIGSTOP",
    ),
    "the first of two exceptions": (
        [computes(0, 9.0, error(5)), computes(1, 9.0, error(4, "OSError")), waits(2)],
        {},
        ("failed", [1], ...),
        "OSError",
        "train.py:4",
    ),
    "Ctrl-C, which ranks see one after the other": (
        [computes(0, 9.0, LOST[1]), *(computes(r, 9.0, error(9 - r, CTRL_C)) for r in (1, 2))],
        {},
        ("failed", [], ...),
        "interrupted by Ctrl-C",
    ),
    "native code crashed": (
        [computes(0, 1.0), computes(1, 1.0, crash(1)), computes(2, 1.0)],
        {"processes": GONE},
        ("failed", [1], True),
        "native code crashed: Segmentation fault",
        "native.py:3",
    ),
    "the process that others saw end": (KILLED, {}, ("failed", [2], False), "killed (SIGKILL)"),
    "and others run": (KILLED, {"processes": RUN | {1: "gone"}}, (..., [1], ...)),
    "an error of all": (
        alike(computes, 9.0, error(5, SHARED, Kind.SHARED_ERROR), end(6)),
        {"summary": {"status": "failed"}},
        ("failed", [], ...),
        SHARED,
    ),
    "the end of the job by a rank that waits": (
        [recording(0, begins(1, 0), REPLACED, seen=9.0), computes(1), waits(2)],
        {},
        ("failed", [], ...),
        "another folder",
    ),
    "without the error of those that wait": (
        [computes(0, 40.0, *LOST), computes(1, 3.0), computes(2, 40.0, *LOST)],
        {},
        ("failed", [1], True),
        "SIGKILL",
    ),
    "ended its program": (
        [waits(0), computes(1, 2.0, end(2)), waits(2)],
        {},
        ("failed", [1], True),
        "ended its program",
    ),
    "alone at the end": ([ENDED[0], computes(1, 3.0), ENDED[2]], {}, ("failed", [1], True)),
    "outside of a group": (
        [*(computes(r, 9.0, begins(2, 0, "group", GROUP)) for r in (0, 1)), computes(2, 9.0)],
        {},
        ("failed", [], False),
    ),
    "all older events are there": ([OLD, computes(1, 9.0, size=2)], {}, (..., [1], ...)),
    "older events are lost": ([OLD, computes(1, 9.0, size=2, complete=False)], {}, (..., [], ...)),
    "a missing recording": ([waits(0), waits(2)], {}, (..., [1], False), "could record"),
    "a missing one, and a late rank": ([waits(0), computes(2)], {}, (..., [2], ...)),
    "stopped": (
        ONE_WAITED_FOR,
        {"processes": RUN | {1: "stopped"}},
        ("failed", [1], True),
        "SIGSTOP",
    ),
    "slow": (ONE_WAITED_FOR, {"processes": RUN}, ("runs", [1], True), "it runs, but"),
    "dead": (ONE_WAITED_FOR, {"processes": RUN | {1: "gone"}}, ("failed", [1], True), "killed"),
    "a job that runs": (LATE, {"processes": RUN}, ("runs", ..., ...)),
    "on other hosts, seen some seconds ago": (LATE, {"now": 1015.0}, ("runs", ..., ...)),
    # A host's clock that is ahead by an hour, or behind, tells nothing of a job that runs or not.
    "clock ahead": (LATE, {"now": 1000.0 - 3600}, ("failed", ..., ...)),
    "clock ahead, and it moves": (
        LATE,
        {"now": 1000.0 - 3600, "moved": range(3)},
        ("runs", ..., ...),
    ),
    "clock behind, and it moves": (
        LATE,
        {"now": 1000.0 + 3600, "moved": range(3)},
        ("runs", ..., ...),
    ),
    "beside a final status": (
        LATE,
        {"now": 1015.0, "summary": {"status": "stalled"}},
        ("failed", ..., ...),
    ),
    "beside the final status of an own loop that goes on": (
        LATE,
        {"processes": RUN, "summary": {"status": "completed"}},
        ("runs", ..., ...),
    ),
    "a process is gone": (LATE, {"now": 1015.0, "processes": {0: "gone"}}, ("failed", ..., ...)),
    "told by the kernel": (
        ONE_WAITED_FOR,
        {"oom_kills": {1: 1}},
        ("failed", [1], ...),
        "lack of memory",
        "--train.micro-batch-size",
    ),
    "told by the scheduler": (
        alike(waits),
        {"scheduler": "TIMEOUT"},
        ("failed", ..., ...),
        "TIMEOUT",
        "--run.max-minutes",
    ),
    "told to end, and killed": (alike(computes, 9.0, sigterm(5)), {}, (..., [], ...), "SIGTERM"),
    # Rank 1 writes the last checkpoint while the others wait; a second Ctrl-C kills all.
    "told to end, and killed in a save": (
        [
            computes(0, 30.0, sigterm(4), begins(5, 1)),
            computes(1, 30.0, sigterm(4)),
            computes(2, 30.0, sigterm(4), begins(5, 1)),
        ],
        {},
        ("failed", [], False),
        "SIGTERM",
    ),
    "told to end, since one rank hung": (
        [
            computes(0, 90.0, begins(5, 1), sigterm(80)),
            computes(1, 90.0, sigterm(80)),
            computes(2, 90.0, begins(5, 1), sigterm(80)),
        ],
        {},
        ("failed", [1], True),
    ),
    **{
        f"a broadcast waits for its root, rank {root}": (
            [computes(0, 9.0), computes(1, 9.0), computes(2, 9.0, begins(2, 1, awaited=root))],
            {},
            (..., [root] if root != 2 else [0, 1], ...),
        )
        for root in range(3)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_who_stopped_first_and_why(case):
    recordings, facts, expected, *words = CASES[case]
    diagnosis = diagnose(recordings, **facts)
    found = diagnosis.state, list(diagnosis.first), diagnosis.sure
    assert [e if e is ... else f for f, e in zip(found, expected, strict=True)] == list(expected)
    cause, fix = [*words, "", ""][:2]
    assert cause in diagnosis.cause
    assert fix in diagnosis.fix
    if cause.startswith("native code"):
        assert "in no collective" not in "".join(describe(diagnosis))
    if "missing" in case:
        assert list(diagnosis.missing) == [1]


def test_clocks_of_hosts_do_not_matter():
    first, *others = ONE_WAITED_FOR
    header = replace(first.header, wall=9e8, monotonic=5e5)
    assert list(diagnose([Recording(header, first.events), *others]).first) == [1]


def test_ranks_that_wait_in_one_call_stand_in_one_line_however_long_each_has_waited():
    for since, seconds in ((2.0, "7"), (3.6, "5 to 7")):
        diagnosis = diagnose([waits(0), computes(1), waits(2, since=since)])
        assert {r: wait.number for r, ((wait, _),) in diagnosis.waits.items()} == {0: 1, 2: 1}
        (line,) = (line for line in describe(diagnosis) if "waiting" in line)
        assert "waiting   ranks 0, 2 on node in all_reduce" in line
        assert f", for {seconds} s, at train.py:9" in line


def test_the_phase_is_the_innermost_open_one_and_that_of_an_error():
    nested = [phase(1, "forward"), Event(2, Kind.PHASE_ENDS, name="forward"), phase(3, "backward")]
    assert recording(0, *nested).phase.name == "backward"
    failed = recording(0, *nested, error(4), phase(5, "close"))
    assert failed.phase.name == "backward"
    unopened = recording(0, Event(2, Kind.PHASE_ENDS, name="data"), phase(3, "forward"))
    assert unopened.phase.name == "forward"
