"""Which ranks are named as slow, and when."""

from mntrain.balance.own_pace import BatchNumber, Pace
from mntrain.train.balancing import Straggler, Stragglers

AT = BatchNumber(0, 0)


def interval(*seconds, samples=10, phase="backward"):
    """Ranks whose 10 samples took so many seconds; what is above 1 second is of a phase."""
    return [
        Pace(
            samples,
            own,
            AT,
            phases={"data": 0.2, "forward": 0.3, "backward": 0.5} | {phase: own - 0.5},
        )
        for own in seconds
    ]


def test_a_rank_that_stays_slow_is_named_once_with_its_phase():
    watch = Stragglers(3)
    assert watch.update(10, interval(1.0, 1.0, 1.0)) == []
    assert watch.update(20, interval(1.0, 2.0, 1.0, phase="data")) == []
    expected = Straggler(rank=1, since=11, ratio=2.0, phase="data")
    assert watch.update(30, interval(1.0, 2.0, 1.0, phase="data")) == [expected]
    assert watch.update(40, interval(1.0, 2.0, 1.0, phase="data")) == []
    assert watch.found == [expected]


def test_a_rank_that_is_slow_for_one_interval_is_not_named():
    watch = Stragglers(2)
    for step in range(10, 200, 10):
        slow = 3.0 if step % 20 else 1.0
        assert watch.update(step, interval(slow, 1.0)) == []


def test_a_rank_that_has_recovered_is_named_and_may_become_slow_again():
    watch = Stragglers(2)
    steps = iter(range(10, 1000, 10))
    changes = [
        watch.update(next(steps), interval(1.0, own)) for own in [3.0] * 2 + [1.0] * 2 + [3.0] * 2
    ]
    assert [len(change) for change in changes] == [0, 1, 0, 1, 0, 1]
    assert [(s.since, s.until) for s in watch.found] == [(1, 20), (41, None)]


def test_a_small_share_is_not_slow():
    watch = Stragglers(2)
    uneven = [*interval(1.0, samples=30), *interval(1.0, samples=10)]  # a third of the speed
    assert watch.update(10, uneven) == watch.update(20, uneven[::-1]) == []
    fair = [*interval(3.0, samples=30), *interval(1.0, samples=10)]
    for step in range(30, 100, 10):
        assert watch.update(step, fair) == []


def test_ranks_without_samples_are_passed_over():
    watch = Stragglers(3)
    for step in range(10, 100, 10):
        idle = Pace(0, 0.0, AT, phases={"data": 0.0, "forward": 0.0, "backward": 0.0})
        assert watch.update(step, [idle, *interval(1.0, 1.1)]) == []
