"""Run the tests of tests/mpi under mpirun, one pytest test for each number of ranks."""

import pytest
from launch import MPI_TESTS, run_suite


@pytest.mark.timeout(660)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_mpi_suite_passes(ranks):
    result = run_suite(ranks, [MPI_TESTS], timeout=600)
    if result.returncode != 0:
        pytest.fail(result.report(), pytrace=False)
