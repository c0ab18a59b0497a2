"""Rounds of disjoint pairs, in which links are measured."""

from itertools import combinations

import pytest

from mntrain.comm.links import rounds


@pytest.mark.parametrize("count", range(9))
def test_rounds_have_each_pair_once_and_no_member_twice_in_a_round(count):
    plan = list(rounds(range(count)))
    pairs = [tuple(sorted(pair)) for pairs in plan for pair in pairs]
    assert sorted(pairs) == list(combinations(range(count), 2))
    assert len(plan) <= max(count, 0)
    for together in plan:
        members = [member for pair in together for member in pair]
        assert len(members) == len(set(members))
