"""Keep the tests of tests/mpi for ranks: test_mpi_suite.py launches them under mpirun."""

from pathlib import Path

import hypothesis
import pytest

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

MPI_TESTS = Path(__file__).parent / "mpi"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    serial = not config.getoption("--with-mpi")
    # None leaves the decision to pytest's other rules.
    return True if serial and collection_path.is_relative_to(MPI_TESTS) else None
