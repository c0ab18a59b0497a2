"""Search for the ranks that others wait for, in made-up statuses."""

from types import SimpleNamespace

import pytest

from mntrain.recorder.late_ranks import Wait
from mntrain.watchdog.monitor import UNCONNECTED, Inquiry
from mntrain.watchdog.rank_status import EXIT, RankStatus


def wait(stream, number, seconds=60.0, root=None, ranks=None):
    return Wait(stream, number, "all_reduce of 8 float32", "train.py:7", seconds, root, ranks)


def status(rank, begun, wait=None, *, debugged=False):
    stack = f'  File "train.py", line {rank}, in main\n'
    return RankStatus(begun, wait, stack, f"train.py:{rank} in main", debugged)


def waits(stream, number, begun=(), **options):
    """The collectives that a waiting rank has begun, and its wait."""
    return {stream: number + 1, **dict(begun)}, wait(stream, number, **options)


def asked(ranks, size=None, left=(), silent=None):
    facts = [
        SimpleNamespace(host="ab"[r % 2], host_key=r % 2, pid=100 + r)
        for r in range(size or len(ranks))
    ]
    statuses = {rank: status(rank, *told) for rank, told in enumerate(ranks)}
    return Inquiry(facts, left, 0.0, statuses=statuses, silent=silent or {})


STOPPED = "stopped by a signal"
# What ranks have begun, and their waits; of other ranks; who waits, who is waited for, and lines.
CASES = {
    "a rank that has not begun": (
        ([waits("w", 4), ({"w": 4},), waits("w", 4)],),
        ({0, 2}, {1}),
        "ranks 0, 2 on a have waited 60 s for rank 1 on b",
        "ranks 0, 2 on a: in all_reduce of 8 float32 (collective 4 of w), called at train.py:7",
        "rank 1 on b (process 101): in no collective, at train.py:1 in main",
    ),
    # 0 waits for 1 in w, and 1 waits in v for 2, which computes.
    "a rank that waits for another one": (
        ([waits("w", 4, {"v": 2}), waits("v", 1, {"w": 4}), ({"w": 4, "v": 1},)],),
        ({0, 1}, {2}),
    ),
    "ranks that wait for each other": (
        ([waits("w", 4, {"v": 1}), waits("v", 1, {"w": 4})],),
        ({0, 1}, {0, 1}),
    ),
    "a rank outside of a stream": (([waits("g", 2), ({},), ({"g": 2},)],), ({0}, {2})),
    "the root of a broadcast": (
        ([({"w": 1},), waits("w", 1, root=2), ({"w": 1},)],),
        ({1}, {2}),
    ),
    "a root that waits": (
        ([waits("w", 1, root=0), ({"w": 1},), waits("w", 1, root=0)],),
        ({0, 2}, {1}),
    ),
    "a rank outside of a group, though it has left": (
        ([waits("g", 1, ranks=(0, 1)), ({"g": 1},)], 4, [2], {3: STOPPED}),
        ({0}, {1}),
    ),
    "a rank of which nothing is known, beside another": (
        ([waits("w", 1), ({"w": 1},)], 3, [], {2: UNCONNECTED}),
        ({0}, {1}),
    ),
    "a rank of which nothing is known, alone": (
        ([waits("w", 1), waits("w", 1)], 3, [], {2: UNCONNECTED}),
        ({0, 1}, {2}),
    ),
    "ranks without an answer, and those that left": (
        ([waits("w", 1)], 3, [1], {2: STOPPED}),
        ({0}, {1, 2}),
        "",
        "rank 1 on b: has left the world, or ended its script",
        "rank 2 on a: does not answer: stopped by a signal",
    ),
    "messages that do not arrive": (
        ([waits("w", 1), waits("w", 1)],),
        ({0, 1}, set()),
        "what all ranks have begun: messages between them do not arrive",
    ),
    "at the exit, while another one waits in a call": (
        ([waits(EXIT, 0, {"w": 4}, seconds=90.0), waits("w", 4, {EXIT: 0})], 2, {0}),
        ({1}, {0}),
        "rank 1 on b has waited 60 s for rank 0 on a",
        "rank 0 on a: has left the world, or ended its script",
    ),
    "at the exit, without an answer": (
        ([waits(EXIT, 0)], 3, {0, 1, 2}, {1: "its process is stopped"}),
        ({0}, {1}),
        "rank 0 on a has waited 60 s at the exit for rank 1 on b, which has not reached the end of "
        "the job",
        "  rank 1 on b: does not answer: its process is stopped",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_waits_for_whom(case):
    given, expected, headline, *lines = [*CASES[case], *[""] * (len(CASES[case]) == 2)]
    found = asked(*given)
    assert (set(found.waits), found.culprits) == expected
    assert headline in found.headline()
    assert all(line in found.details() for line in lines)
    if case == "a rank that has not begun":
        assert found.stacks().count("stack of") == 2


def test_a_debugger_is_named():
    found = asked([waits("w", 1), ({"w": 1},)])
    found.statuses[1] = status(1, {"w": 1}, debugged=True)
    assert "in no collective, in a debugger, at train.py:1" in found.details()
