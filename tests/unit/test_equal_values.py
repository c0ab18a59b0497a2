"""The error about values that differ between ranks."""

import pytest

from mntrain.equal_values import Given, compare, expect_same
from mntrain.errors import AgreedError


def difference(*values, fix=""):
    """The error for these values of ranks 0, 1, ... of the option "x"."""
    with pytest.raises(AgreedError) as error:
        expect_same([{"x": value} for value in values], 0, fix)
    return str(error.value)


def test_values_that_differ_are_told_with_their_ranks_and_the_fix():
    assert difference(1, 2) == "x differs between ranks: rank 0 has 1, rank 1 has 2"
    assert difference("a", "b", "a", "b", fix="give one") == (
        "x differs between ranks: ranks 0, 2 have a, ranks 1, 3 have b: give one"
    )


def test_of_lists_the_first_items_that_differ_are_told():
    assert difference([1, 2, 3], [1, 2, 3], [1, 4, 5], [1]) == (
        "x differs between ranks: ranks 0, 1 have 2, rank 2 has 4, rank 3 has no more"
    )
    assert "rank 0 has [1], rank 1 has 1" in difference([1], 1)


def test_every_name_is_told_also_one_that_a_rank_lacks():
    with pytest.raises(AgreedError) as error:
        expect_same([{"x": 1, "y": 1, "z": 0}, {"x": 2, "z": 0, "u": None}], 0, "fix it")
    assert str(error.value) == (
        "x differs between ranks: rank 0 has 1, rank 1 has 2; "
        "y differs between ranks: rank 0 has 1, rank 1 has nothing; "
        "u differs between ranks: rank 0 has nothing, rank 1 has None: fix it"
    )


def test_of_many_ranks_values_and_names_a_few_are_told():
    assert difference(*[1] * 500, 2, *[1] * 523) == (
        "x differs between ranks: ranks 0 to 499, 501 to 1023 have 1, rank 500 has 2"
    )
    assert difference(*range(9)).endswith("rank 4 has 4, others have 4 more values")
    with pytest.raises(AgreedError, match=r"; 3 more differ: fix it$"):
        expect_same([dict.fromkeys("abcdefgh", rank) for rank in (0, 1)], 0, "fix it")


def test_where_a_value_is_from_is_told_and_is_no_difference():
    expect_same([{"x": Given(1, "a.toml")}, {"x": Given(1, "b.toml")}], 0)
    said = difference(Given(1, "a.toml"), Given(1, "b.toml"), Given(2))
    assert said == "x differs between ranks: ranks 0, 1 have 1 (a.toml), rank 2 has 2"


def test_values_travel_only_if_their_digests_differ():
    sent = []

    def gather(others):
        def gathered(value):
            sent.append(value)
            return [value, others(value)]

        return gathered

    compare(gather(lambda value: value), {"x": 1}, 0)
    assert len(sent) == 1
    assert len(sent[0]) == 32
    compare(gather(lambda value: b"" if value == sent[0] else {"x": 1.0}), {"x": 1}, 0)
    with pytest.raises(AgreedError, match="x differs between ranks: rank 0 has 1, rank 1 has 2"):
        compare(gather(lambda value: b"" if value == sent[0] else {"x": 2}), {"x": 1}, 0)
