"""Ranks end together as those of tests/mpi do."""

import importlib.util

import pytest
from launch import MPI_TESTS

_spec = importlib.util.spec_from_file_location("conftest_of_ranks", MPI_TESTS / "conftest.py")
_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_ranks)
pytest_configure = _ranks.pytest_configure
pytest_timeout_set_timer = _ranks.pytest_timeout_set_timer


@pytest.fixture(scope="session", autouse=True)
def process_group(tmp_path_factory):
    """torch.distributed over the ranks of mpirun, for DDP."""
    import torch.distributed as dist
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    path = comm.bcast(str(tmp_path_factory.mktemp("store") / "store"))
    store = dist.FileStore(path, comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    yield
    dist.destroy_process_group()
