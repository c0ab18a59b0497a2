"""When communication is slow, and which nodes' links are behind it."""

import pytest

from mntrain.data.shares import BatchNumber, Pace
from mntrain.train.link_watch import LinkWatch, communication_of
from mntrain.train.stragglers import Straggler

LINKS = [100e6, 100e6, 100e6]
AT = BatchNumber(0, 0)


def paces(communication_s, own_s=0.1):
    """Of three ranks, which compute for one, one and two times `own_s` in each of ten steps."""
    return [
        Pace(100, 10 * times * own_s, AT, ((2 - times) * own_s + communication_s,) * 10)
        for times in (1, 1, 2)
    ]


def changes(watch, seconds, first=10):
    return [watch.update(first + 10 * i, paces(s)) for i, s in enumerate(seconds)]


def test_communication_is_what_the_rank_that_computes_longest_waits_for():
    assert communication_of(paces(0.03)) == pytest.approx(0.03)
    uneven = [Pace(1, 1.0, AT, (0.5, 0.1, 0.9)), Pace(1, 1.0, AT, (0.2, 0.3, 0.4))]
    assert communication_of(uneven) == pytest.approx(0.2)  # of 0.2, 0.1 and 0.4
    assert communication_of([Pace(1, 1.0, AT), Pace(1, 1.0, AT)]) is None


def test_communication_that_stays_slow_is_said_once_and_so_is_its_end():
    watch = LinkWatch(LINKS, [0, 2, 4])
    said = changes(watch, [0.1, 0.1, 0.3, 0.3, 0.3, 0.3, 0.1, 0.1, 0.1])
    assert said == [None, None, None, "slow", None, None, None, "recovered", None]


def test_a_link_that_is_slower_than_at_the_start_is_named_by_its_leader():
    watch = LinkWatch(LINKS, [0, 2, 4])
    changes(watch, [0.1, 0.1, 0.3, 0.3])
    assert watch.ratio == pytest.approx(3.0)
    assert watch.compare([90e6, 25e6, 100e6]) == {1: 25e6}
    expected = Straggler(rank=2, since=21, ratio=4.0, phase="communication")
    assert watch.found == [expected]
    changes(watch, [0.1, 0.1], first=50)
    assert [(one.since, one.until) for one in watch.found] == [(21, 40)]


@pytest.mark.parametrize(
    "seconds",
    [
        [0.1, 0.3, 0.1, 0.3, 0.1, 0.3],  # one interval each time
        [0.001, 0.001, 0.01, 0.01, 0.01],  # ten times as long, and still nothing beside computing
        [0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.22],  # slowly: it is then usual
    ],
)
def test_what_is_no_slow_link_is_not_named(seconds):
    assert set(changes(LinkWatch(LINKS, [0, 2, 4]), seconds)) == {None}


def test_communication_that_is_little_beside_computing_is_no_longer_slow():
    watch = LinkWatch(LINKS, [0, 2, 4])
    said = changes(watch, [0.001, 0.1, 0.1, 0.01, 0.01])
    assert said == [None, None, "slow", None, "recovered"]
