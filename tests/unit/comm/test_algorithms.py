import re

import pytest

from mntrain.comm import algorithms
from mntrain.comm.algorithms import AlgorithmChoice


def test_an_algorithm_that_there_is_not_is_refused():
    words = "unknown algorithm 'ring': choose flat, lanes, leader, naive"
    with pytest.raises(ValueError, match=re.escape(words)):
        algorithms.load("ring")


def test_one_of_several_goes_in_fewer_and_longer_pieces():
    alone = AlgorithmChoice("lanes", 256 << 10)
    among = alone.among_others()
    assert among.algorithm == alone.algorithm
    assert among.chunk_bytes == 2 * alone.chunk_bytes
    assert among.min_chunks < alone.min_chunks
    assert (alone.concurrent, among.concurrent) == (False, True)
