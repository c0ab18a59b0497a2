import re

import pytest

from mntrain.comm import algorithms
from mntrain.comm.algorithm_table import AlgorithmChoice, AlgorithmTable

SMALL, MIDDLE, LARGE = (
    AlgorithmChoice("naive"),
    AlgorithmChoice("leader", 64 << 10),
    AlgorithmChoice("lanes", 4 << 20),
)


@pytest.mark.parametrize(
    ("nbytes", "choice"),
    [
        (0, SMALL),
        (99, SMALL),
        (100, SMALL),
        (101, MIDDLE),
        (2000, MIDDLE),
        (2001, LARGE),
        (9999, LARGE),
        (1 << 40, LARGE),  # beyond the last step
    ],
)
def test_a_step_goes_up_to_its_bytes_and_the_last_one_beyond(nbytes, choice):
    assert AlgorithmTable(((100, SMALL), (2000, MIDDLE), (9000, LARGE))).of(nbytes) == choice


@pytest.mark.parametrize("algorithm", algorithms.names())
def test_always_is_one_choice_for_every_size(algorithm):
    table = AlgorithmTable.always(algorithm, 4321)
    assert {table.of(nbytes) for nbytes in (0, 1, 1 << 50)} == {AlgorithmChoice(algorithm, 4321)}


@pytest.mark.parametrize("make", [AlgorithmChoice, AlgorithmTable.always])
def test_an_algorithm_that_there_is_not_is_refused(make):
    words = "unknown algorithm 'ring': choose auto, flat, lanes, leader, naive"
    with pytest.raises(ValueError, match=re.escape(words)):
        make("ring")


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(1 << 20, "1 MiB"), (4 << 20, "4 MiB"), (256 << 10, "256 KiB"), (1536 << 10, "1536 KiB")],
)
def test_a_choice_in_words(nbytes, words):
    assert str(AlgorithmChoice("lanes", nbytes)) == f"lanes, {words} chunks"


def test_one_of_several_goes_in_fewer_and_longer_pieces():
    table = AlgorithmTable(
        ((100, AlgorithmChoice("flat")), (1000, AlgorithmChoice("lanes", 256 << 10)))
    )
    among = table.among_others()
    assert [most for most, _ in among.steps] == [100, 1000]
    for (_, alone), (_, choice) in zip(table.steps, among.steps, strict=True):
        assert choice.algorithm == alone.algorithm
        assert choice.chunk_bytes == 2 * alone.chunk_bytes
        assert choice.min_chunks < alone.min_chunks
        assert not alone.concurrent
        assert choice.concurrent
