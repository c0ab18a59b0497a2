"""Data-loader workers beside an active world: they import what ranks import, and start no MPI."""

import os

import pytest
import torch
from samples import Witness
from torch.utils.data import DataLoader
from worlds import first_ranks

import mntrain

pytestmark = [
    # Of torch where a machine has fewer cores, and of newer Pythons at a fork beside threads.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_workers_load_while_collectives_run(method):
    """On two ranks; others only take longer."""
    with first_ranks(2) as comm:
        if comm is not None:
            load_beside_collectives(comm, method)


def load_beside_collectives(comm, method):
    loader = DataLoader(
        Witness(24),
        batch_size=2,
        num_workers=1,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    with mntrain.init(comm, device="cpu") as world:
        gradient = torch.ones(70001)
        for _ in range(2):
            seen, processes = [], set()
            for index, process, communicates, has_mpi in loader:
                work = world.collectives.all_reduce(gradient)
                seen += index.tolist()
                processes |= set(process.tolist())
                assert not any(communicates)
                assert method == "fork" or not any(has_mpi)  # a fork holds what its parent had
                work.wait()
                gradient /= world.size
            assert seen == list(range(24))
            assert len(processes - {os.getpid()}) == 1
        assert set(gradient.tolist()) == {1}
        assert world.sum([1.0]) == [world.size]
