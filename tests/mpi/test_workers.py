"""Data-loader workers beside an active world: they import what ranks import, and start no MPI."""

import os

import pytest
import torch
from mpi4py import MPI
from samples import Witness
from torch.utils.data import DataLoader
from worlds import make_world

RANKS = MPI.COMM_WORLD.size
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.simulated,
    # Of torch where a machine has fewer cores, and of newer Pythons at a fork beside threads.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_load_while_collectives_run(method):
    if RANKS != 2:
        pytest.skip("two ranks show it; others only take longer")
    loader = DataLoader(
        Witness(24),
        batch_size=2,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    with make_world() as world:
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
                gradient /= RANKS
            assert seen == list(range(24))
            assert len(processes - {os.getpid()}) == 2
        assert set(gradient.tolist()) == {1}
        assert world.sum([1.0]) == [RANKS]
    assert MPI.COMM_WORLD.allreduce(1) == RANKS


class EqualWitness(Witness):
    """In place of the process, which differs between ranks: whether it is the one that asks."""

    def __init__(self, count):
        super().__init__(count)
        self.asks = os.getpid()

    def __getitem__(self, index):
        index, process, *others = super().__getitem__(index)
        return index, process == self.asks, *others


def test_a_sharded_loader_keeps_its_workers_apart_from_the_world():
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}
    loader = DataLoader(EqualWitness(12), batch_size=6, **workers)
    with make_world() as world:
        mine = []
        for index, here, communicates, _ in world.shard(loader):
            mine += index.tolist()
            assert not any(here)
            assert not any(communicates)
            assert world.sum([len(index)]) == [6]
        together = [sample for samples in world.gather(mine) for sample in samples]
        assert sorted(together) == list(range(12))
