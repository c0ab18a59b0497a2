"""Collectives to try: what goes in, where it lies in memory, and what must come out."""

import functools
import hashlib
import random
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from mpi4py import MPI
from worlds import RANKS, Worlds

from mntrain.comm.shared_memory import NodeSharedMemory
from mntrain.comm.ticket import AlgorithmChoice

RANK = MPI.COMM_WORLD.rank
CPU = torch.device("cpu")
PIECE_BYTES = AlgorithmChoice("lanes").chunk_bytes

# Multiples of these, up to 68 of them, are exact in the dtype and in none that is narrower.
UNIT = {
    torch.float16: 1,
    torch.bfloat16: 1,
    torch.float32: 4099,
    torch.float64: 2**40 + 1,
    torch.int64: 2**56 + 1,
}

VERBS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]

# Where a tensor lies: in memory of its own, in memory that the node shares, at an odd place there;
# or on some ranks of a node there, and on others not.
PLACES = ["plain", "shared", "odd", "mixed"]


class Arena:
    """Memory that a node shares, to lay tensors into: `allocate` takes some time each. Collective.

    What was laid out before `clear` is laid over after it.
    """

    def __init__(self, world, nbytes=4 << 20):
        self._memory = world.collectives.allocate(nbytes, torch.uint8, CPU)
        self._used = 0

    def clear(self):
        self._used = 0

    def tensor(self, numel, dtype, place):
        """A tensor of any content."""
        if place == "plain" or (place == "mixed" and RANK % 3 == 1):
            return torch.empty(numel, dtype=dtype)
        start = self._used + -self._used % 64 + (dtype.itemsize if place != "shared" else 0)
        self._used = start + numel * dtype.itemsize
        assert self._used <= len(self._memory)
        return self._memory[start : self._used].view(dtype)


@contextmanager
def out_of_reach():
    """Let no rank copy from another's private memory, as where the kernel does not allow it."""
    with pytest.MonkeyPatch.context() as patch:
        none = property(lambda memory: [], lambda memory, pids: None)
        patch.setattr(NodeSharedMemory, "pids", none, raising=False)
        yield


class Ways:
    """Worlds by layout, each made once, and their collectives by any algorithm. Collective."""

    def __init__(self):
        self._worlds = Worlds()
        self._arenas = {}

    def __call__(self, algorithm="lanes", layout=None, piece_bytes=PIECE_BYTES):
        world = self._worlds("lanes", layout)
        if layout not in self._arenas:
            self._arenas[layout] = Arena(world)
        self._arenas[layout].clear()
        return Way(world, algorithm, piece_bytes, self._arenas[layout])

    def close(self):
        self._worlds.close()


class Way:
    """The collectives of a world by one algorithm."""

    def __init__(self, world, algorithm, piece_bytes, arena, gathered_bytes=0):
        self.world, self.arena, self.algorithm = world, arena, algorithm
        self.collectives = world.collectives.replace(
            choice=AlgorithmChoice(algorithm, piece_bytes), small_message_bytes=gathered_bytes
        )

    def by(self, algorithm, piece_bytes=PIECE_BYTES):
        """Another way in the same world."""
        return Way(self.world, algorithm, piece_bytes, self.arena)

    def gathered(self, most=1 << 30):
        """The same way, but that of so many bytes in all everyone gathers everything."""
        return Way(self.world, self.algorithm, PIECE_BYTES, self.arena, most)

    @property
    def nodes(self):
        """The ranks whose sum is made first."""
        alone = self.algorithm not in ("leader", "lanes")
        return [[rank] for rank in range(RANKS)] if alone else self.world.topology.nodes

    def lay(self, values, place="plain"):
        """A copy of a tensor at such a place."""
        return self.arena.tensor(len(values), values.dtype, place).copy_(values)


@functools.cache
def ramp(rank, numel, dtype=torch.float32):
    """Return what `rank` puts into a sum: another small multiple of the unit at every place."""
    index = torch.arange(numel)
    return (((index * 40503 // 64 + 5 * rank) % 29 - 11) * UNIT[dtype]).to(dtype)


@functools.cache
def total(numel, dtype=torch.float32):
    wide = torch.int64 if dtype == torch.int64 else torch.float64
    exact = torch.stack([ramp(rank, numel, dtype) for rank in range(RANKS)]).sum(0, dtype=wide)
    assert torch.equal(exact.to(dtype).to(wide), exact)
    return exact.to(dtype)


def junk(numel, dtype=torch.float32):
    """Make what must not be looked at."""
    return torch.full((numel,), float("nan") if dtype.is_floating_point else -7, dtype=dtype)


def shard(collectives, numel, bounds=None):
    """Return the bounds of this rank's shard of a tensor."""
    slot = collectives.slot(RANK)
    cut = bounds or [i * numel // RANKS for i in range(RANKS + 1)]
    return slice(cut[slot], cut[slot + 1])


def cuts(numel):
    """Bounds of every kind: all in one slot, whichever it is, and at random, some shards empty."""
    generator = random.Random(numel)
    choices = [range(numel + 1), range(numel + 1), [0, numel // 2, numel]]
    inner = [sorted(generator.choices(choice, k=RANKS - 1)) for choice in choices]
    one_slot = [[0] * (slot + 1) + [numel] * (RANKS - slot) for slot in range(RANKS)]
    return one_slot + [[0, *indices, numel] for indices in inner]


def bits(tensor):
    return tensor.view(torch.uint8)


def check_bits(world, tensors):
    """Assert that all ranks hold the same bits."""
    digest = hashlib.blake2b()
    for tensor in tensors:
        digest.update(bits(tensor).numpy())
    assert len(set(world.gather(digest.hexdigest()))) == 1


class Case:
    """One collective: fills its tensor, launches, and says whether the result is right."""

    def __init__(
        self, way, verb, numel, dtype=torch.float32, *, root=None, bounds=None, place="plain"
    ):
        self.collectives, self.verb, self.root, self.bounds = way.collectives, verb, root, bounds
        self.tensor = way.arena.tensor(numel, dtype, place)
        self.everywhere = verb != "reduce_scatter"  # whether all ranks end with the same
        self.where = f"{verb} of {numel} {dtype}, {place}, from {root} in {bounds}"

    def launch(self):
        numel, dtype = self.tensor.numel(), self.tensor.dtype
        if self.verb in ("all_reduce", "reduce_scatter"):
            self.tensor.copy_(ramp(RANK, numel, dtype))
        else:
            self.tensor.copy_(junk(numel, dtype))
        if self.verb == "all_gather":
            mine = shard(self.collectives, numel, self.bounds)
            self.tensor[mine] = ramp(0, numel, dtype)[mine]
        if self.verb == "broadcast":
            if self.root == RANK:
                self.tensor.copy_(ramp(RANK, numel, dtype))
            return self.collectives.broadcast(self.tensor, self.root)
        given = {"bounds": self.bounds} if self.bounds else {}
        return getattr(self.collectives, self.verb)(self.tensor, **given)

    def check(self):
        numel, dtype = self.tensor.numel(), self.tensor.dtype
        if self.verb in ("all_reduce", "reduce_scatter"):
            expected = total(numel, dtype)
        else:
            expected = ramp(self.root or 0, numel, dtype)
        everything = slice(None)
        mine = everything if self.everywhere else shard(self.collectives, numel, self.bounds)
        assert torch.equal(self.tensor[mine], expected[mine]), self.where


def cases(way, sizes, dtype=torch.float32, *, roots=(), place="plain"):
    verbs = ["all_reduce", "reduce_scatter", "all_gather"]
    return [
        *(Case(way, verb, numel, dtype, place=place) for verb, numel in product(verbs, sizes)),
        *(
            Case(way, "broadcast", numel, dtype, root=root, place=place)
            for root, numel in product(roots, sizes)
        ),
    ]


def run(world, several):
    """Launch all before any is waited for, the last one first; check; compare between ranks."""
    works = [case.launch() for case in several]
    for work in reversed(works):
        work.wait()
    for case in several:
        case.check()
    check_bits(world, [case.tensor for case in several if case.everywhere])


def in_order(tensors):
    """The sum of one level, first to last, in fp32 or wider and rounded once."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return functools.reduce(torch.add, [t.to(wide) for t in tensors]).to(tensors[0].dtype)
