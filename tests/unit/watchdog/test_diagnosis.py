"""Who waits for whom, from made-up statuses."""

import json
from types import SimpleNamespace

from mntrain.recorder.late_ranks import Wait
from mntrain.watchdog.monitor import UNCONNECTED, Inquiry
from mntrain.watchdog.rank_status import EXIT, RankStatus


def status(rank, begun, wait=None, *, debugged=False):
    stack = f'  File "train.py", line {rank}, in main\n'
    return rank, RankStatus(begun, wait, stack, f"train.py:{rank} in main", debugged)


def wait(stream, number, seconds=60.0, root=None, ranks=None):
    return Wait(stream, number, "all_reduce of 8 float32", "train.py:7", seconds, root, ranks)


def asked(*statuses, size=None, left=(), silent=None):
    facts = [SimpleNamespace(host="ab"[r % 2], pid=100 + r) for r in range(size or len(statuses))]
    return Inquiry(facts, left, 0.0, statuses=dict(statuses), silent=silent or {})


def waiting_and_culprits(inquiry):
    return set(inquiry.waits), inquiry.culprits


def test_the_rank_that_has_not_begun_is_waited_for():
    found = asked(
        status(0, {"w": 5}, wait("w", 4)), status(1, {"w": 4}), status(2, {"w": 5}, wait("w", 4))
    )
    assert waiting_and_culprits(found) == ({0, 2}, {1})
    assert found.headline() == "ranks 0, 2 on a have waited 60 s for rank 1 on b"
    text = found.details()
    assert (
        "ranks 0, 2 on a: in all_reduce of 8 float32 (collective 4 of w), called at train.py:7"
        in text
    )
    assert "rank 1 on b (process 101): in no collective, at train.py:1 in main" in text
    assert found.stacks().count("stack of") == 2


def test_a_rank_that_waits_for_another_one_is_no_culprit():
    # 0 waits for 1 in w, and 1 waits in v for 2, which computes.
    found = asked(
        status(0, {"w": 5, "v": 2}, wait("w", 4)),
        status(1, {"w": 4, "v": 2}, wait("v", 1)),
        status(2, {"w": 4, "v": 1}),
    )
    assert waiting_and_culprits(found) == ({0, 1}, {2})


def test_ranks_that_wait_for_each_other_are_all_named():
    found = asked(
        status(0, {"w": 5, "v": 1}, wait("w", 4)), status(1, {"w": 4, "v": 2}, wait("v", 1))
    )
    assert waiting_and_culprits(found) == ({0, 1}, {0, 1})


def test_a_rank_outside_of_a_stream_is_not_waited_for():
    found = asked(status(0, {"g": 3}, wait("g", 2)), status(1, {}), status(2, {"g": 2}))
    assert found.culprits == {2}


def test_only_the_root_of_a_broadcast_is_waited_for():
    found = asked(
        status(0, {"w": 1}), status(1, {"w": 2}, wait("w", 1, root=2)), status(2, {"w": 1})
    )
    assert found.culprits == {2}


def test_the_root_of_a_broadcast_waits_for_the_rank_that_does_not_come():
    found = asked(
        status(0, {"w": 2}, wait("w", 1, root=0)),
        status(1, {"w": 1}),
        status(2, {"w": 2}, wait("w", 1, root=0)),
    )
    assert waiting_and_culprits(found) == ({0, 2}, {1})


def test_a_rank_outside_of_a_group_is_not_waited_for_there_though_it_has_left():
    found = asked(
        status(0, {"g": 2}, wait("g", 1, ranks=(0, 1))),
        status(1, {"g": 1}),
        size=4,
        left=[2],
        silent={3: "stopped by a signal"},
    )
    assert waiting_and_culprits(found) == ({0}, {1})


def test_a_rank_of_which_nothing_is_known_is_named_only_if_there_is_no_other():
    waits = status(0, {"w": 2}, wait("w", 1))
    found = asked(waits, status(1, {"w": 1}), size=3, silent={2: UNCONNECTED})
    assert waiting_and_culprits(found) == ({0}, {1})
    found = asked(waits, status(1, {"w": 2}, wait("w", 1)), size=3, silent={2: UNCONNECTED})
    assert waiting_and_culprits(found) == ({0, 1}, {2})


def test_ranks_without_an_answer_and_those_that_left_are_waited_for():
    found = asked(
        status(0, {"w": 2}, wait("w", 1)), size=3, left=[1], silent={2: "stopped by a signal"}
    )
    assert found.culprits == {1, 2}
    assert "rank 1 on b: has left the world, or ended its script" in found.details()
    assert "rank 2 on a: does not answer: stopped by a signal" in found.details()


def test_messages_that_do_not_arrive_are_told_from_ranks_that_do_not_come():
    found = asked(status(0, {"w": 2}, wait("w", 1)), status(1, {"w": 2}, wait("w", 1)))
    assert waiting_and_culprits(found) == ({0, 1}, set())
    assert "what all ranks have begun: messages between them do not arrive" in found.headline()


def test_a_debugger_is_named():
    found = asked(status(0, {"w": 2}, wait("w", 1)), status(1, {"w": 1}, debugged=True))
    assert "in no collective, in a debugger, at train.py:1" in found.details()


def test_a_status_survives_its_message():
    for own in (wait("w", 2), wait("g", 0, ranks=[1, 2]), None):
        _, original = status(1, {"w": 3}, own)
        assert RankStatus.from_message(json.loads(json.dumps(original._asdict()))) == original


def test_a_rank_at_the_exit_is_waited_for_and_does_not_wait_if_another_one_waits_in_a_call():
    found = asked(
        status(0, {"w": 4, EXIT: 1}, wait(EXIT, 0, seconds=90.0)),
        status(1, {"w": 5, EXIT: 0}, wait("w", 4)),
        left={0},
    )
    assert waiting_and_culprits(found) == ({1}, {0})
    assert found.headline() == "rank 1 on b has waited 60 s for rank 0 on a"
    assert "rank 0 on a: has left the world, or ended its script" in found.details()


def test_a_rank_that_does_not_answer_is_waited_for_at_the_exit():
    waits = status(0, {EXIT: 1}, wait(EXIT, 0))
    found = asked(waits, size=3, left={0, 1, 2}, silent={1: "its process is stopped"})
    assert found.headline() == (
        "rank 0 on a has waited 60 s at the exit for rank 1 on b, which has not reached the end of "
        "the job"
    )
    assert found.details() == "  rank 1 on b: does not answer: its process is stopped"
