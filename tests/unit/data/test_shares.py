"""Shares of a batch by speed, and their revisions."""

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mntrain.balance.shares import (
    INTERVAL,
    LEAST,
    REVISION,
    BatchNumber,
    Pace,
    Shares,
    share_bounds,
    smoothed,
)
from mntrain.data.sampling import SampleOrder
from zero.layout import split

SPEEDS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6).map(tuple)


def counts(samples, speeds):
    return [stop - start for start, stop in pairwise(share_bounds(samples, len(speeds), speeds))]


def paces(speeds, drawn=0):
    """An interval in which ranks had these speeds."""
    return [Pace(100, 100 / speed, BatchNumber(0, drawn)) for speed in speeds]


@given(st.integers(0, 500), SPEEDS)
def test_shares_are_the_whole_batch_and_no_rank_is_left_out(samples, speeds):
    parts = counts(samples, speeds)
    size = len(speeds)
    assert sum(parts) == samples
    assert all(part >= 0 for part in parts)
    if samples >= size:
        assert min(parts) >= max(1, LEAST * samples / size)


@given(st.integers(6, 300), st.lists(st.floats(0.5, 4), min_size=2, max_size=4).map(tuple))
def test_no_move_of_a_sample_makes_a_batch_faster(samples, speeds):
    parts, size = counts(samples, speeds), len(speeds)
    taken = max(part / speed for part, speed in zip(parts, speeds, strict=True))
    for giver in range(size):
        for taker in set(range(size)) - {giver}:
            moved = [part - (r == giver) + (r == taker) for r, part in enumerate(parts)]
            if moved[giver] >= max(1, LEAST * samples / size):
                assert max(p / s for p, s in zip(moved, speeds, strict=True)) >= taken


@given(st.integers(1, 300), SPEEDS, st.data())
def test_no_share_is_above_its_ranks_limit(samples, speeds, data):
    equal = -(-samples // len(speeds))
    spare = st.none() | st.integers(-9, 9)
    spares = data.draw(st.lists(spare, min_size=len(speeds), max_size=len(speeds)))
    limits = tuple(None if spare is None else equal + spare for spare in spares)
    bounds = share_bounds(samples, len(speeds), speeds, limits)
    parts = [stop - start for start, stop in pairwise(bounds)]
    assert sum(parts) == samples
    for part, limit in zip(parts, limits, strict=True):
        assert limit is None or part <= max(limit, equal)


def test_without_speeds_shares_are_equal():
    assert share_bounds(11, 3, None) == split(11, 3)
    assert Shares(3, 11).bounds(11, BatchNumber(0, 7)) == split(11, 3)
    assert share_bounds(2, 3, (9.0, 1.0, 1.0)) == split(2, 3)  # fewer samples than ranks


@given(st.integers(1, 40), st.integers(1, 4), st.data())
def test_the_order_of_samples_does_not_depend_on_shares(batch_size, size, data):
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=size, max_size=size))
    shares = Shares(size, batch_size, tuple(speeds))
    equal = SampleOrder(101, batch_size, seed=3)
    order = SampleOrder(101, batch_size, seed=3, shares=shares)
    for step in range(2 * equal.steps_per_epoch):
        parts = [
            [sample for micro in order.micro_batches(step, r, size, 4) for sample in micro]
            for r in range(size)
        ]
        assert [*chain(*parts)] == equal.share(step, 0, 1).tolist()
        assert [len(part) for part in parts] == [
            len(order.share(step, r, size)) for r in range(size)
        ]
        assert order.position(step) == equal.position(step)


def test_shares_change_behind_the_last_batch_that_any_rank_has_drawn():
    shares = Shares(2, 12, (1.0, 0.5))  # a hint holds until speeds are measured
    assert shares.divide(12, BatchNumber(0, 14)) == ((0, 8, 12), 0)
    shares.bounds(12, BatchNumber(0, 15))  # divides nothing
    assert shares.drawn == BatchNumber(0, 14)
    by_rank = [Pace(100, 100.0, BatchNumber(0, 14)), Pace(100, 50.0, BatchNumber(0, 17))]
    assert shares.revise(by_rank).first == BatchNumber(0, 18)
    assert shares.bounds(12, BatchNumber(0, 17)) == (0, 8, 12)
    assert shares.bounds(12, BatchNumber(0, 18)) == (0, 4, 12)
    assert shares.bounds(12, BatchNumber(1, 0)) == (0, 4, 12)  # the next pass
    assert [shares.entry(one) for one in shares.revisions] == [
        {"step": 1, "samples": [8, 4]},
        {"step": 19, "samples": [4, 8]},
    ]
    assert shares.describe() == "ranks have 4, 8 of 12 samples"
    assert Shares(2, 12).entry(Shares(2, 12).revisions[0]) is None


def test_shares_are_revised_now_and_again_but_not_for_noise():
    shares, noisy = Shares(2, 120), Shares(4, 64)
    revised = []
    for step in range(INTERVAL, 4 * REVISION, INTERVAL):
        fast = 2.0 if step <= 60 else 6.0
        if shares.revise(paces((fast, 1.0), drawn=step)):
            revised.append(step)
    # 10, then every 50 steps, if that pays: at 110 the mean still has some of the old speed.
    assert revised == [10, 110, 160]
    measured = 2.0 + 4.0 * (1 - 0.7**10)
    assert shares.counts(shares.revisions[-1])[0] == pytest.approx(
        120 * measured / (measured + 1), abs=1
    )
    for step in range(INTERVAL, 10 * REVISION, INTERVAL):
        speeds = [1 + 0.04 * ((step // INTERVAL + rank) % 3 - 1) for rank in range(4)]
        assert noisy.revise(paces(speeds)) is None
    assert noisy.counts(noisy.revisions[-1]) == [16] * 4


def test_speeds_are_exponential_means():
    assert smoothed(None, paces((2.0, 1.0))) == (2.0, 1.0)
    assert smoothed((2.0, 1.0), paces((1.0, 1.0))) == pytest.approx((1.7, 1.0))
    idle = Pace(0, 0.0, BatchNumber(0, 0))
    assert smoothed((2.0, 1.0), [idle, *paces((2.0,))]) == pytest.approx((2.0, 1.3))
    assert smoothed(None, [idle, *paces((2.0,))]) is None
