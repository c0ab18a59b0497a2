"""Ranks end together as those of tests/mpi do, whose oracle and models they use."""

import importlib.util
import sys

import pytest
from launch import MPI_TESTS

sys.path.append(str(MPI_TESTS))
_spec = importlib.util.spec_from_file_location("conftest_of_ranks", MPI_TESTS / "conftest.py")
_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_ranks)
pytest_configure = _ranks.pytest_configure
pytest_timeout_set_timer = _ranks.pytest_timeout_set_timer


@pytest.fixture(scope="session")
def worlds():
    from gpu.ranks.transports import Worlds  # it imports MPI

    kept = Worlds()
    yield kept
    kept.close()
