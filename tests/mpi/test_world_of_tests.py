import os

import pytest
from mpi4py import MPI

pytestmark = pytest.mark.mpi


def test_mpi4py_sees_the_world_that_mpirun_started():
    # With the mpirun of another MPI library, every rank is alone in a world of its own.
    size = os.environ.get("PMI_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"]
    assert MPI.COMM_WORLD.size == int(size)


def test_ranks_are_numbered_from_zero_without_gaps():
    world = MPI.COMM_WORLD
    assert world.allgather(world.rank) == list(range(world.size))


def test_all_reduce_adds_over_every_rank():
    world = MPI.COMM_WORLD
    assert world.allreduce(world.rank + 1) == world.size * (world.size + 1) // 2


@pytest.mark.mpi(min_size=2)
def test_a_message_goes_around_the_ring():
    world = MPI.COMM_WORLD
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    assert world.sendrecv(world.rank, dest=right, source=left) == left
