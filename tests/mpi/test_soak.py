"""Many collectives of all kinds, in one long turn: results, and what they leave behind.

By hand, for longer: MNTRAIN_SOAK=5000 python tests/helpers/launch.py 4 tests/mpi/test_soak.py -s
"""

import ctypes
import gc
import os
import random
import threading
import time

import pytest
import torch
from cases import CPU, RANK, Drawn
from mpi4py import MPI
from worlds import RANKS, VIRTUAL, make_world

from mntrain.comm import mpi
from mntrain.comm.world_collectives import SMALL_MESSAGE_BYTES

pytestmark = pytest.mark.mpi

CALLS = int(os.environ.get("MNTRAIN_SOAK", "300"))
SIZES = [0, 1, 2, 7, 100, 1003, 2048, 5003, 9001, 20011, 40000]  # up to 320 KB
LIGHT_BYTES = 16 << 10  # some of the sizes in some of the dtypes
MOST_UNDER_WAY = 12
MOST_GROWTH = 16 << 20  # bytes of memory, between the middle and the end


class SoakCall(Drawn):
    """A random collective on memory of its own, or on some that the node shares."""

    def __init__(self, common, world, pool):
        most = common.choice([0, SMALL_MESSAGE_BYTES])
        super().__init__(common, world, SIZES, small_message_bytes=most)
        wire = common.choice([None, torch.bfloat16, torch.float16])
        self.given = {"wire": wire} if self.sums and self.dtype == torch.float32 else {}
        places = [common.choice(["plain", "shared"]) for _ in range(RANKS)]
        if common.random() < 0.5:
            places = places[:1] * RANKS
        start, segment = common.randrange(16), pool[common.randrange(len(pool))]
        self.segment = None
        self.tensor = torch.empty(self.numel, dtype=self.dtype)
        if places[RANK] == "shared" and not segment.busy:
            self.segment = segment
            self.tensor = segment.lend(start, self.numel, self.dtype)
        self.about += f", {self.given}, {places}"

    def start(self):
        self.work = self.launch(self.tensor.fill_(-1), **self.given)

    def finish(self):
        self.work.wait()
        assert self.right(self.tensor), self.about
        if self.segment is not None:
            self.tensor.fill_(-2)  # it is the caller's again
            self.segment.busy = False


class Segment:
    """Memory that the node shares, for one collective at a time."""

    def __init__(self, world):
        self._memory = world.collectives.allocate((max(SIZES) + 16) * 8, torch.uint8, CPU)
        self.busy = False

    def lend(self, start, numel, dtype):
        self.busy = True
        return self._memory.view(dtype)[start : start + numel]


def state():
    """Return what of the process may not grow: memory, descriptors, shared maps, threads."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    MPI.COMM_WORLD.Barrier()
    with open("/proc/self/status") as lines:
        memory = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    with open("/proc/self/maps") as lines:
        maps = sum("/memfd:mntrain" in line for line in lines)
    return 1024 * memory, (len(os.listdir("/proc/self/fd")), maps, threading.active_count())


def messages_under_way():
    return [one for one in gc.get_objects() if type(one) is mpi.Requests and one._requests]


def play(common, own, worlds, calls):
    """So many collectives. `own`: what this rank does in its own time."""
    pools = [[Segment(world) for _ in range(4)] for world in worlds]
    under_way = []
    for _ in range(calls):
        which = common.randrange(len(worlds))
        world, pool = worlds[which], pools[which]
        call = SoakCall(common, world, pool)
        if own.random() < 0.1:
            time.sleep(own.uniform(0, 0.003))
        call.start()
        under_way.append(call)
        while len(under_way) > common.randrange(MOST_UNDER_WAY):
            under_way.pop(own.randrange(len(under_way))).finish()
        chance = common.random()
        if chance < 0.02:
            while under_way:  # on other ranks, others of them may lie in this memory
                under_way.pop().finish()
            pool[common.randrange(len(pool))] = Segment(world)
        elif chance < 0.04:
            assert world.gather(RANK) == list(range(RANKS))
    for call in under_way:
        call.finish()


@pytest.mark.exhaustive
@pytest.mark.timeout(250 + CALLS / 10)
def test_thousands_of_collectives_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr("mntrain.comm.world_collectives.NO_WAKE_BYTES", LIGHT_BYTES)
    worlds = [make_world("lanes", layout) for layout in {None, VIRTUAL[-1], max(1, RANKS // 2)}]
    common, own = random.Random(7), random.Random(RANK)
    states = []
    for _ in range(2):
        play(common, own, worlds, CALLS // 2)
        for world in worlds:
            world.collectives.allocate(1, torch.uint8, CPU)  # lets go of what is dead
        states.append(state())
        assert messages_under_way() == []
        assert all(world._engine.idle for world in worlds)
    (first, counts), (second, counts_at_end) = states
    growths = worlds[0].gather(second - first)
    for world in worlds:
        world.close()
    assert counts_at_end == counts
    assert max(growths) < MOST_GROWTH
