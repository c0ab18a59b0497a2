"""Whole micro-batches by speed: their numbers, revisions of these, and their samples."""

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mntrain.balance.cadence import (
    LEAST_STEPS,
    Cadence,
    efficiency,
    micro_batch_counts,
    tuned_anchor,
)
from mntrain.balance.shares import INTERVAL, REVISION, BatchNumber, Pace
from mntrain.data.randomness import permuted
from mntrain.data.sampling import BEGIN, CadenceSampling

SPEEDS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


def make(size=2, micro_batch=4, samples=10**6, target=0.1, max_anchor=0, **options):
    return Cadence(size, micro_batch, samples, target=target, max_anchor=max_anchor, **options)


def paces(speeds, communication_s, drawn=0):
    """An interval in which ranks wait for communication, and the faster ones for the slowest."""
    waits = [communication_s + 7.0 * (speed > min(speeds)) for speed in speeds]
    return [
        Pace(100, 100 / speed, BatchNumber(0, drawn), (wait,) * INTERVAL)
        for speed, wait in zip(speeds, waits, strict=True)
    ]


# ---- counts by speed ----


@given(st.integers(1, 50), SPEEDS)
def test_counts_are_the_anchor_in_proportion_to_speeds(anchor, speeds):
    counts = micro_batch_counts(anchor, speeds)
    assert counts[speeds.index(min(speeds))] == anchor == min(counts)
    for count, speed in zip(counts, speeds, strict=True):
        assert abs(count - anchor * (speed / min(speeds))) <= 0.5


# ---- the anchor ----


@pytest.mark.parametrize(
    ("anchor", "communication_s", "expected"),
    [
        (10, 0.99, 10),  # 10 micro-batches of the slowest rank take 10 s
        (10, 0.51, 10),
        (10, 1.01, 13),
        (10, 40.0, 500),
        (10, 0.3, 4),
        (10, 0.0, 1),
        (1, 0.0, 1),
        (1, 0.09, 1),
        (1, 0.11, 2),
        (2, 0.11, 2),
    ],
)
def test_the_anchor_lets_communication_take_its_part(anchor, communication_s, expected):
    assert tuned_anchor(anchor, (4.0, 1.0), 1, communication_s, 0.1) == expected
    # 1 and 1 micro-batches would leave the faster rank idle for a third of the time.
    assert tuned_anchor(10, (1.45, 1.0), 1, 0.0, 0.1) == 2
    assert efficiency((40, 10), (4.0, 1.0)) == 1
    assert efficiency((10, 10), (4.0, 1.0)) == pytest.approx(2 / 5)
    assert efficiency((3,), (0.1,)) == pytest.approx(1)


@given(
    st.integers(1, 100), SPEEDS, st.integers(1, 64), st.floats(0, 1e3), st.sampled_from([0.01, 0.5])
)
def test_a_tuned_anchor_stays(anchor, speeds, micro_batch, communication_s, target):
    rest = speeds, micro_batch, communication_s, target
    tuned = tuned_anchor(anchor, *rest)
    assert communication_s <= target * tuned * micro_batch / min(speeds) * (1 + 1e-9)
    if tuned > anchor:
        assert tuned_anchor(tuned, *rest) == tuned
    if tuned < anchor:
        wasted = 1 / efficiency(micro_batch_counts(tuned, speeds), speeds)
        before = 1 / efficiency(micro_batch_counts(anchor, speeds), speeds)
        assert wasted <= max(before, 1.05) * (1 + 1e-9)


# ---- the revisions of a job ----


@pytest.mark.parametrize(
    ("options", "speeds", "communication_s", "before", "after"),
    [
        # 10 micro-batches take 40 s on rank 0, for which rank 1 waits: the least wait counts.
        ({}, (1.0, 4.0), 8.0, (10, 10), (25, 100)),
        # Speeds that are known before hold until they are measured.
        ({"hints": (1.0, 0.25)}, (1.0, 1.0), 3.2, (40, 10), (10, 10)),
        # A step has at most an epoch: 100 micro-batches.
        ({"samples": 403}, (24.0, 1.0), 3.2, (10, 10), (96, 4)),
        ({"tunes": False}, (2.0, 1.0), 400.0, (10, 10), (20, 10)),
        ({"samples": 4000}, (1.0, 1.0), 160.0, (10, 10), (500, 500)),  # half of an epoch each
        ({"samples": 4000, "max_anchor": 20}, (1.0, 1.0), 160.0, (10, 10), (20, 20)),
        # A step in ten of an epoch, by itself: 100 micro-batches.
        ({"samples": 4000, "max_anchor": None}, (1.0, 1.0), 160.0, (10, 10), (50, 50)),
        ({"samples": 4000, "max_anchor": 3}, (4.0, 1.0), 160.0, (3, 3), (12, 3)),
    ],
)
def test_plans_before_and_after_an_interval(options, speeds, communication_s, before, after):
    cadence = make(**options)
    assert cadence.latest.counts == before
    revision = cadence.revise(paces(speeds, communication_s))
    assert revision is not None
    assert revision.counts == after


def test_revisions_are_rare_and_neither_noise_nor_one_long_wait_moves_anything():
    cadence, revised = make(3), []
    for step in range(INTERVAL, 12 * REVISION, INTERVAL):
        noise = [1 + 0.03 * ((step // INTERVAL + rank) % 3 - 1) for rank in range(3)]
        speeds = [fast * by for fast, by in zip((4.0, 1.0, 2.5), noise, strict=True)]
        if revision := cadence.revise(paces(speeds, 3.0 * noise[0], drawn=step)):
            revised.append((step, revision.anchor))
    assert revised == [(10, 10)]
    interval = [pace._replace(waits=(500.0, *pace.waits[1:])) for pace in paces((1.0, 1.0), 3.2)]
    assert make().revise(interval) is None


def test_a_rank_that_recovers_gets_its_micro_batches_back():
    cadence = make()
    cadence.revise(paces((4.0, 1.0), 3.2))
    for step in range(20, 70, INTERVAL):
        cadence.revise(paces((4.0, 4.0), 0.8, drawn=step))
    assert [revision.first.batch for revision in cadence.revisions] == [0, 1, 61]
    fast, recovered = cadence.latest.counts
    assert recovered <= fast < 1.2 * recovered


def test_an_anchor_at_its_automatic_limit_does_not_follow_noise():
    # 400 micro-batches in each of 10 steps, in proportion 4 to 1: the largest anchor is 80.
    cadence = make(samples=16000, max_anchor=None)
    for step in range(INTERVAL, 12 * REVISION, INTERVAL):
        noise = 1 + 0.04 * (step // INTERVAL % 3 - 1)
        cadence.revise(paces((4.0 * noise, 1.0), 500.0, drawn=step))
    anchors = [revision.anchor for revision in cadence.revisions]
    assert len(anchors) == 2
    assert anchors[-1] == pytest.approx(80, abs=4)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3000))
def test_an_epoch_has_ten_steps_if_it_can(size, micro_batch, samples):
    if samples // micro_batch < size:
        with pytest.raises(ValueError, match=rf"{size} micro-batches of {micro_batch} on {size}"):
            make(size, micro_batch, samples, max_anchor=None)
        return
    counts = make(size, micro_batch, samples, max_anchor=None).latest.counts
    assert len(set(counts)) == 1
    assert counts[0] == max(1, min(10, samples // micro_batch // LEAST_STEPS // size))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"samples": 79, "max_anchor": 0},
            "the dataset has 79 samples, and the first step takes 20 micro-batches of 4 on 2 "
            "ranks: give a smaller --train.micro-batch-size, or --balance.max-anchor none",
        ),
        ({"samples": 7, "max_anchor": None}, "takes 2 micro-batches of 4 on 2 ranks: give a small"),
    ],
)
def test_what_has_no_first_step_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
    make(samples=80, max_anchor=0)


# ---- samples ----


def order(samples, seed, epochs):
    """The samples of so many epochs, in their order."""
    return [i for e in range(epochs) for i in permuted(0, samples, samples, seed, e).tolist()]


def drawn(sampling, steps, size, micro_batch):
    """The samples of each step: of all ranks, in their order; parts have whole micro-batches."""
    for step in steps:
        order = sampling.at(step)
        by_rank = [order.micro_batches(step, rank, size, micro_batch) for rank in range(size)]
        yield by_rank


@given(st.data())
def test_the_order_of_samples_is_that_of_any_run(data):
    size, micro_batch = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    samples = data.draw(st.integers(size * micro_batch, 90))
    cadence = make(size, micro_batch, samples, max_anchor=None)
    sampling = CadenceSampling(cadence, samples, seed=3, drop_last=False, origin=BEGIN)
    seen, revised, lengths = [], 0, []
    for step in range(40):
        [by_rank] = drawn(sampling, [step], size, micro_batch)
        batch = [*chain(*chain(*by_rank))]
        seen += batch
        lengths.append(len(sampling.at(step).batch(step)))
        assert lengths[-1] == len(batch)
        counts = cadence.revisions[cadence.index(BatchNumber(0, step))].counts
        if len(batch) == sum(counts) * micro_batch:
            assert tuple(map(len, by_rank)) == counts
            assert all(len(one) == micro_batch for rank in by_rank for one in rank)
        if step % INTERVAL == INTERVAL - 1:
            speeds = data.draw(st.lists(st.floats(0.2, 5), min_size=size, max_size=size))
            ahead = step + data.draw(st.integers(0, 3))
            revised += cadence.revise(paces(speeds, 0.0, drawn=ahead)) is not None
    assert seen == order(samples, 3, len(seen) // samples + 1)[: len(seen)]
    assert [
        len(sampling.at(step).batch(step)) for step in range(40)
    ] == lengths  # earlier revisions stay
    assert len(cadence.revisions) == 1 + revised
    for before, after in pairwise(range(40)):
        begin, end = sampling.at(before).position(before), sampling.at(after).position(after)
        ends = (end.epoch - begin.epoch) * samples + end.offset - begin.offset
        assert ends == lengths[before]


def test_the_last_batch_is_divided_in_proportion_or_left_out():
    for drop_last in (False, True):
        cadence = make(2, 2, 101, max_anchor=4, hints=(1.0, 0.25))  # 16 and 4 micro-batches
        sampling = CadenceSampling(cadence, 101, seed=0, drop_last=drop_last, origin=BEGIN)
        order = sampling.at(0)
        lengths = [[len(order.share(step, rank, 2)) for rank in (0, 1)] for step in range(3)]
        assert lengths[:2] == [[32, 8]] * 2
        assert lengths[2] == ([32, 8] if drop_last else [17, 4])
        assert order.position(2) == ((2, 1, 0) if drop_last else (2, 0, 80))
        assert order.steps_per_epoch == (2 if drop_last else 3)
