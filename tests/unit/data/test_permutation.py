from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mntrain.data.randomness import permuted


@given(st.integers(1, 20_000), st.data())
def test_every_number_comes_once_and_a_part_is_that_of_the_whole(size, data):
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    key = data.draw(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 50)))
    whole = permuted(0, size, size, *key)
    assert sorted(whole) == list(range(size))
    assert permuted(start, stop, size, *key).tolist() == whole[start:stop].tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_a_few_is_as_likely(size):
    keys = 4000
    counts = Counter(tuple(permuted(0, size, size, key)) for key in range(keys))
    orders = list(permutations(range(size)))
    assert set(counts) == set(orders)
    expected = keys / len(orders)
    chi_square = sum((counts[order] - expected) ** 2 / expected for order in orders)
    assert chi_square < {1: 11, 5: 21, 23: 50}[len(orders) - 1]  # p = 0.001


def test_neighbours_are_not_related():
    size, keys = 50, 2000
    orders = np.array([permuted(0, size, size, key) for key in range(keys)])
    gaps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % size).ravel(), minlength=size)[1:]
    expected = gaps.sum() / (size - 1)
    chi_square = ((gaps - expected) ** 2 / expected).sum()
    assert chi_square < 85  # of 48 degrees of freedom, p = 0.001
    places = np.bincount(orders[:, 0], minlength=size)
    assert ((places - keys / size) ** 2 / (keys / size)).sum() < 86


def test_the_permutation_is_pinned():
    # A resumed job must go on in the order that it began with.
    assert permuted(0, 8, 8, 3, 1).tolist() == [0, 4, 5, 7, 2, 6, 3, 1]
