"""Paces in a job: a rank's own time, by a clock that tests set, and ranks that are slow."""

from types import SimpleNamespace

import pytest
import torch
from sharding import Clock

from mntrain.balance import own_pace
from mntrain.balance.own_pace import BatchNumber, Pace
from mntrain.balance.stragglers import Straggler, Stragglers
from mntrain.data.balancing import StepBalancing

PHASES = {"data": 0.5, "forward": 0.1, "backward": 0.2, "reduce_wait": 0.0}


@pytest.mark.parametrize(
    ("device", "phases"),
    [
        ("cpu", {"data": 4.5, "forward": 9 * 1.3, "backward": 1.8}),
        ("cuda", {"data": 4.5, "forward and backward": 9 * 1.5}),
    ],
)
def test_own_time_is_that_of_a_step_without_waits(monkeypatch, device, phases):
    clock, sent = Clock(), []
    monkeypatch.setattr(own_pace, "time", clock)
    world = SimpleNamespace(
        size=2,
        device=torch.device(device),
        waits=clock,
        gather=lambda own: sent.append(own) or [own, own],
    )
    balancing = StepBalancing(world, None)
    for step in range(1, 11):
        balancing.begin()
        clock.now += 100.0 if step == 1 else 2.0  # the first step compiles
        clock.now += 7.0  # waiting for other ranks
        clock.waited += 7.0
        balancing.end(4, PHASES)
        clock.now += 0.5  # the rest of the step
        balancing.after_reduction(step)
        clock.now += 5.0  # an evaluation
    [(_, pace)] = sent
    assert (pace.samples, pace.seconds) == (9 * 4, pytest.approx(9 * 2.0))
    assert pace.waits == pytest.approx([7.5] * 9)
    assert pace.phases == pytest.approx(phases)
    assert balancing.figures() == {"samples": 40, "own_s": pytest.approx(118.0)}


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


def test_a_rank_that_has_recovered_is_named_and_may_become_slow_again():
    watch = Stragglers(2)
    steps = iter(range(10, 1000, 10))
    changes = [
        watch.update(next(steps), interval(1.0, own)) for own in [3.0] * 2 + [1.0] * 2 + [3.0] * 2
    ]
    assert [len(change) for change in changes] == [0, 1, 0, 1, 0, 1]
    assert [(s.since, s.until) for s in watch.found] == [(1, 20), (41, None)]


IDLE = Pace(0, 0.0, AT, phases={"data": 0.0, "forward": 0.0, "backward": 0.0})


@pytest.mark.parametrize(
    "intervals",
    [
        [interval(3.0, 1.0), interval(1.0, 1.0)],  # for one interval in two
        [
            [*interval(1.0, samples=30), *interval(1.0)],
            [*interval(1.0), *interval(1.0, samples=30)],
        ],
        [[*interval(3.0, samples=30), *interval(1.0, samples=10)]],  # of a small share
        [[IDLE, *interval(1.0, 1.1)]],
    ],
)
def test_other_ranks_are_not_named(intervals):
    watch = Stragglers(len(intervals[0]))
    for step in range(10, 200, 10):
        assert watch.update(step, intervals[step // 10 % len(intervals)]) == []


def test_slow_ranks_are_told_of_and_are_in_the_metrics_while_ranks_compare():
    own, told, compared = 1.0, [], []

    def gather(value):
        compared.append(step)
        return [(value[0], pace) for pace in interval(1.0, own, phase="data")]

    places = [SimpleNamespace(host=name) for name in "ab"]
    output = SimpleNamespace(note=told.append, warn=told.append)
    world = SimpleNamespace(size=2, waits=Clock(), gather=gather, places=places, output=output)
    balancing = StepBalancing(world, None, advice="; advice", every=12)
    for step in range(3, 60, 3):  # an exchange every third step
        own = 2.0 if 18 < step <= 45 else 1.0
        balancing.compare(step)
        assert balancing.slow_ranks(step) == ({"1/data": 2.0} if step >= 30 else {})
    assert compared == [12, 21, 30, 42, 51]
    assert balancing.slow_ranks(57 + 12) == {"1/data": 2.0}
    assert balancing.slow_ranks(57 + 13) == {}
    own = 1.0
    for step in (60, 70):
        balancing.compare(step)
    assert told == [
        "since step 11, rank 1 on b takes 2.0 times as long for a sample as the other ranks "
        "(median), mostly in data; advice",
        "rank 1 on b is no longer slow after step 40",
    ]
