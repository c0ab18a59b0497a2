"""Run the tests of tests/mpi under mpirun, one pytest test for each number of ranks."""

import pytest
from launch import MPI_TESTS, run_suite

# Of one rank what is not of several; two and three ranks share what either shows. At four what
# depends on who is in which node, and not on what is computed there; parity and the wire's dtypes
# are tested on emulated nodes, two of two ranks.
OF_ONE = ("checkpoint", "collectives", "memory", "parity", "state", "trainer", "world")
OF_NODES = ("collectives", "state", "transports")
AT_TWO = ("memory", "stage_model", "stage_precision", "stage_updates", "state")
AT_THREE = ("jobs", "cost", "stage_cost", "soak", "transports", "wire")
SUITES = {
    1: [MPI_TESTS / f"test_{name}.py" for name in OF_ONE],
    2: [MPI_TESTS, *(f"--ignore={MPI_TESTS}/test_{name}.py" for name in AT_THREE)],
    3: [MPI_TESTS, *(f"--ignore={MPI_TESTS}/test_{name}.py" for name in AT_TWO)],
    4: [MPI_TESTS / f"test_{name}.py" for name in OF_NODES],
}


@pytest.mark.timeout(660)
@pytest.mark.parametrize("ranks", SUITES)
def test_mpi_suite_passes(ranks):
    result = run_suite(ranks, SUITES[ranks], timeout=600)
    if result.returncode != 0:
        pytest.fail(result.report(), pytrace=False)
