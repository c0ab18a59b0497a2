import pytest


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
