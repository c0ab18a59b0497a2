"""Run the tests of tests/mpi under mpirun, one pytest test for each number of ranks."""

import pytest
from launch import MPI_TESTS, run_suite

# At four ranks what depends on who is in which node, and not on what is computed there; parity and
# the wire's dtypes are tested on emulated nodes, two of two ranks.
OF_NODES = ("checkpoint", "collectives", "lifecycle", "soak", "stages", "state", "world")
SUITES = {
    # Jobs of one rank are the oracle of the others.
    1: [MPI_TESTS, f"--ignore={MPI_TESTS / 'test_jobs.py'}"],
    2: [MPI_TESTS],
    3: [MPI_TESTS],
    4: [MPI_TESTS / f"test_{name}.py" for name in OF_NODES],
}


@pytest.mark.timeout(660)
@pytest.mark.parametrize("ranks", SUITES)
def test_mpi_suite_passes(ranks):
    result = run_suite(ranks, SUITES[ranks], timeout=600)
    if result.returncode != 0:
        pytest.fail(result.report(), pytrace=False)
