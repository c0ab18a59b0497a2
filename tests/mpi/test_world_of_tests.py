import os

import pytest
from mpi4py import MPI

pytestmark = pytest.mark.mpi


def test_mpi4py_sees_the_world_that_mpirun_started():
    # With the mpirun of another MPI library, every rank is alone in a world of its own.
    size = os.environ.get("PMI_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"]
    assert MPI.COMM_WORLD.size == int(size)
