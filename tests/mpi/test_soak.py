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
from cases import CPU, RANK, shard
from mpi4py import MPI
from worlds import RANKS, VIRTUAL, make_world

from mntrain.comm import algorithms, mpi
from mntrain.comm.algorithms import AlgorithmChoice
from mntrain.comm.collectives import SMALL_MESSAGE_BYTES

pytestmark = pytest.mark.mpi

CALLS = int(os.environ.get("MNTRAIN_SOAK", "300"))
SIZES = [0, 1, 2, 7, 100, 1003, 2048, 5003, 9001, 20011, 40000]  # up to 320 KB
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]
VERBS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
LIGHT_BYTES = 16 << 10  # some of the sizes in some of the dtypes
MOST_UNDER_WAY = 12
MOST_GROWTH = 16 << 20  # bytes of memory, between the middle and the end


class Call:
    """One collective, whose result is known beforehand. `common` has the same chance on all."""

    def __init__(self, common, world, pool):
        numel = common.choice(SIZES)
        dtype = common.choice(DTYPES)
        self.verb = common.choice(VERBS)
        self.root = common.randrange(RANKS)
        self.bounds = None
        if common.random() < 0.5:
            inner = sorted(common.choices(range(numel + 1), k=RANKS - 1))
            self.bounds = [0, *inner, numel]
        nbytes = numel * dtype.itemsize
        # As few as one piece a lane, or a few dozens.
        piece_bytes = max(64, nbytes // common.choice([1, 4, 30]))
        algorithm = common.choice(algorithms.names())
        self.collectives = world.collectives.replace(
            choice=AlgorithmChoice(algorithm, piece_bytes),
            small_message_bytes=common.choice([0, SMALL_MESSAGE_BYTES]),
        )
        wire = common.choice([None, torch.bfloat16, torch.float16])
        sums = self.verb in ("all_reduce", "reduce_scatter")
        self.given = {"wire": wire} if sums and dtype == torch.float32 else {}
        self.salt = common.randrange(100)
        place = [common.choice(["plain", "shared"]) for _ in range(RANKS)]
        if common.random() < 0.5:
            place = place[:1] * RANKS
        start = common.randrange(16)
        segment = common.randrange(len(pool))
        self.segment = None
        self.tensor = torch.empty(numel, dtype=dtype)
        if place[RANK] == "shared" and not pool[segment].busy:
            self.segment = pool[segment]
            self.tensor = self.segment.lend(start, numel, dtype)
        self.about = (
            f"{self.verb} of {numel} {dtype} by {algorithm} in {piece_bytes}, {self.given}, "
            f"root {self.root}, {self.bounds}, {place}"
        )

    def values(self, rank):
        """Small whole numbers: sums of them are exact in every dtype."""
        index = torch.arange(self.tensor.numel())
        return (index * 7 + 3 * rank + self.salt) % 11 - 5

    def start(self):
        if self.verb == "broadcast":
            mine = self.values(RANK) if self.root == RANK else -1
        elif self.verb == "all_gather":
            mine = torch.full(self.tensor.shape, -1)
            own = shard(self.collectives, len(mine), self.bounds)
            mine[own] = self.values(0)[own]
        else:
            mine = self.values(RANK)
        self.tensor.copy_(mine) if torch.is_tensor(mine) else self.tensor.fill_(mine)
        given = {"broadcast": [self.root], "all_reduce": []}.get(self.verb, [self.bounds])
        launch = getattr(self.collectives, self.verb)
        self.work = launch(self.tensor, *given, **self.given)

    def finish(self):
        self.work.wait()
        found = self.tensor.long()
        mine = slice(None)
        if self.verb in ("all_reduce", "reduce_scatter"):
            expected = torch.stack([self.values(rank) for rank in range(RANKS)]).sum(0)
        else:
            expected = self.values(self.root if self.verb == "broadcast" else 0)
        if self.verb == "reduce_scatter":
            mine = shard(self.collectives, len(found), self.bounds)
        assert torch.equal(found[mine], expected[mine]), self.about
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
    """What of the process may not grow: memory, descriptors, shared maps, threads."""
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
        call = Call(common, world, pool)
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


@pytest.mark.thorough
@pytest.mark.timeout(60 + CALLS / 10)
def test_thousands_of_collectives_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr("mntrain.comm.collectives.NO_WAKE_BYTES", LIGHT_BYTES)
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
