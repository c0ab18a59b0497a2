"""The judgement of what ranks report about their calls, without communication."""

import pytest
import torch

from mntrain.comm.disagreement import find_disagreement, make_report
from mntrain.comm.engine import Future, Stream, steps_of
from mntrain.comm.ticket import Signature, Ticket, digest_of


def stream(name, calls, ranks=None):
    made = Stream(name, ranks)
    for call in calls:
        made.begin(Ticket(call if isinstance(call, Signature) else Signature(call), "here"))
    return made


def report(waits_in="", **calls):
    """Return the report of a rank with these calls by stream, the last of which is not finished."""
    streams = [stream(name, several) for name, several in calls.items()]
    for each in streams:
        if each.history:
            task = Future(steps_of(lambda: None), None)
            task.ticket = each.history[-1]
            each.active.append(task)
    return make_report(streams, waits_in)


def find(*reports):
    return find_disagreement(dict(enumerate(reports)))


@pytest.mark.parametrize(
    "reports",
    [
        [report(a=["x", "y"], b=["z"])] * 2,
        [report(a=["x", "y"]), report(a=["x"]), report(a=[])],  # behind
        [report(a=["x"], b=["y"]), report(b=["y"], a=["x"])],  # of different streams
        # A rank that computes, or has other threads, may call what the others wait for.
        [report("a", a=["x"], b=[]), report("", a=[], b=["y"])],
        # Both wait for a rank that computes.
        [report("a", a=["x"], b=["y"]), report("b", a=["x"], b=["y"]), report(a=[], b=[])],
        [report("a", a=["x"], b=[]), report("a", a=["x"], b=[])],  # all are there
    ],
)
def test_ranks_that_may_go_on_do_not_disagree(reports):
    assert find(*reports) is None
    assert find_disagreement({2: reports[0]}) is None  # the others are silent


def test_the_first_difference_counts_and_equal_ranks_are_named_together():
    found = find(report(a=["x", "y", "w"]), report(a=["x", "z", "w"]), report(a=["x", "y"]))
    assert found.splitlines()[:3] == [
        "ranks disagree about collective 1 of a:",
        "  ranks 0, 2: y, called at here",
        "  rank 1: z, called at here",
    ]


def test_a_call_after_a_difference_differs_too():
    ours, theirs = (stream("a", [first, "same"]).history[-1] for first in ("x", "y"))
    assert ours.signature == theirs.signature
    assert ours.digest != theirs.digest


def test_a_broadcast_waits_for_its_root_only():
    call = Signature("broadcast", root=0)
    waits = report("a", a=[call], b=[])
    assert find(report("b", a=[call], b=["y"]), waits) is None
    assert find(report("b", a=[], b=["y"]), waits) is not None
    assert find(report("", a=[], b=[]), report("b", a=[], b=["y"]), waits) is None


def test_unequal_calls_have_unequal_digests_and_equal_ones_have_one_in_any_process():
    equal = Signature("all_reduce", "", torch.float32, (0, 4), 0, None, None, False)
    others = [
        equal._replace(**{name: value})
        for name, value in [
            ("verb", "all_gather"),
            ("label", "bucket 1"),
            ("dtype", torch.int32),
            ("bounds", (0, 5)),
            ("root", 1),
            ("wire", torch.float16),
            ("small", True),
            ("parts", 2),
        ]
    ]
    assert len({digest_of(each) for each in [equal, *others]}) == 9
    assert digest_of(equal) == 4108121656747475264  # in any process
