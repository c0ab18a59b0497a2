"""Values that differ between ranks, and the error that names the ranks."""

from types import SimpleNamespace

import pytest

from mntrain.alike.naming import difference, odd_ranks
from mntrain.alike.values import compare
from mntrain.errors import AgreedError


def compared(by_rank, fix=""):
    """Compare the values of ranks 0, 1, ..., by name or of the option "x"; return what was sent."""
    values = [value if isinstance(value, dict) else {"x": value} for value in by_rank]
    sent = []

    def gather(value):
        sent.append(value)
        digests = [repr(sorted(given.items())).encode() for given in values]
        return digests if isinstance(value, bytes) else values

    compare(SimpleNamespace(rank=0, size=len(values), gather=gather), values[0], fix)
    return sent


def said(by_rank, fix=""):
    """The error for values that differ."""
    with pytest.raises(AgreedError) as error:
        compared(by_rank, fix)
    return str(error.value)


X = "x differs between ranks: "
SEVERAL = [{"x": 1, "y": 1, "z": 0}, {"x": 2, "z": 0, "u": None}]


@pytest.mark.parametrize(
    ("by_rank", "words"),
    [
        ((1, 2), X + "rank 0 has 1, rank 1 has 2: give one"),
        ("abab", X + "ranks 0, 2 have a, ranks 1, 3 have b: give one"),
        (
            ([1, 2, 3], [1, 2, 3], [1, 4, 5], [1]),
            X + "ranks 0, 1 have 2, rank 2 has 4, rank 3 has no more: give one",
        ),
        (([1], 1), X + "rank 0 has [1], rank 1 has 1: give one"),
        (
            SEVERAL,
            X + "rank 0 has 1, rank 1 has 2; "
            "y differs between ranks: rank 0 has 1, rank 1 has nothing; "
            "u differs between ranks: rank 0 has nothing, rank 1 has None: give one",
        ),
        (
            [*[1] * 500, 2, *[1] * 523],
            X + "ranks 0 to 499, 501 to 1023 have 1, rank 500 has 2: give one",
        ),
        (range(9), "rank 4 has 4, others have 4 more values: give one"),
        ([dict.fromkeys("abcdefgh", rank) for rank in (0, 1)], "; 3 more differ: give one"),
    ],
)
def test_values_that_differ_are_told_with_their_ranks_and_the_fix(by_rank, words):
    found = said(by_rank, "give one")
    assert found == words if words.startswith(X) else found.endswith(words)
    assert said((1, 2)) == X + "rank 0 has 1, rank 1 has 2"


def test_values_travel_only_if_their_digests_differ():
    (digest,) = compared((1, 1))
    assert len(digest) == 32
    assert compared((1, 1.0))[1:] == [{"x": 1}]  # equal, though of other digests


def test_the_hosts_of_values_are_named():
    found = difference("x", [1, 1, 1, 2, 1, 1], dict(enumerate("aaabb")))
    where = "ranks 0 to 2 on a, 4 on b, 5 have 1, rank 3 on b has 2"
    assert found == X + where


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("", []),
        ("a", []),
        ("aaaa", []),
        ("aaba", [2]),
        ("baaa", [0]),
        ("abca", [1, 2]),
        ("aabb", [2, 3]),
        ("abba", [1, 2]),
        ("ab", [1]),
        ("abcd", [1, 2, 3]),
        ("abbcc", [0, 3, 4]),
    ],
)
def test_odd_ranks_are_those_without_the_most_common_value(values, expected):
    assert odd_ranks(dict(enumerate(values))) == expected
