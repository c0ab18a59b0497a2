"""Worlds for the tests of this folder: every algorithm, on nodes of every shape."""

import shutil
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from mpi4py import MPI

import mntrain
from mntrain import AgreedError
from mntrain.comm import algorithms, mpi

RANKS = MPI.COMM_WORLD.size

# A layout is a number of ranks per node (None: one node), or a letter of a host for every rank:
# dealt in turn, dealt there and back, with the small node first, and more than two unequal nodes.
# The last of VIRTUAL has as many lanes as there can be between nodes: of four ranks, two.
VIRTUAL = [None, *(count for count in (1, 2, 3) if count < RANKS and (count, RANKS) != (3, 4))]
DEALT = [hosts for hosts in ("aba", "abb", "abba", "abbb", "abbc") if len(hosts) == RANKS]
LAYOUTS = VIRTUAL + DEALT

# The layout tells the one-level algorithms only which messages to count where.
EVERY_WORLD = [
    pytest.param(algorithm, layout, id=f"{algorithm}-{layout or 'one'}")
    for algorithm in algorithms.names()
    for layout in (LAYOUTS if algorithm in ("leader", "lanes") else LAYOUTS[:2])
]


USUAL = object()


@contextmanager
def hosts(letters):
    """Let MPI say that rank i is on the host letters[i]."""
    with pytest.MonkeyPatch.context() as patch:
        keys = [letters.index(letter) for letter in letters]
        patch.setattr(mpi.Communicator, "node_keys", lambda _: keys)
        yield


def make_world(algorithm="lanes", layout=None, **options):
    options = {"algorithm": algorithm, "device": "cpu", **options}
    if isinstance(layout, str):
        with hosts(layout):
            return mntrain.init(**options)
    return mntrain.init(ranks_per_node=layout, **options)


class Worlds:
    """Worlds by their options, each made once and kept; collective, as `init` is."""

    def __init__(self, layout=None, **usual):
        self._layout, self._usual, self._worlds = layout, usual, {}
        self._comms = {RANKS: MPI.COMM_WORLD}

    def __call__(self, algorithm="lanes", layout=USUAL, bucket_mb=USUAL, *, size=RANKS):
        """Return the world of ranks 0 to size - 1; None on the others."""
        key = algorithm, layout, bucket_mb, size
        if size not in self._comms:
            color = 0 if MPI.COMM_WORLD.rank < size else MPI.UNDEFINED
            self._comms[size] = MPI.COMM_WORLD.Split(color)
        if MPI.COMM_WORLD.rank < size and key not in self._worlds:
            options = self._usual if bucket_mb is USUAL else {"bucket_mb": bucket_mb}
            layout = self._layout if layout is USUAL else layout
            options = {"comm": self._comms[size], **options}
            self._worlds[key] = make_world(algorithm, layout, **options)
        return self._worlds.get(key)

    def close(self):
        for world in self._worlds.values():
            world.close()
        for size, comm in self._comms.items():
            if MPI.COMM_WORLD.rank < size < RANKS:
                comm.Free()


def have(ranks):
    """The ranks of a range as the error about a difference names them: ranks 0, 1 have."""
    first, *_, last = [*ranks, ranks[-1]]
    if first == last:
        return f"rank {first} has"
    return f"ranks {first}{', ' if last == first + 1 else ' to '}{last} have"


BUT_LAST = have(range(max(RANKS - 1, 1)))
# Of a comparison of weights, where the last rank's differ: of two, nobody can tell who is right.
SIDES = "rank 0 against rank 1" if RANKS == 2 else f"rank {RANKS - 1} against the others"


def refusal(function, *args, error=AgreedError, **kwargs):
    """Call what every rank must refuse alike, with an error of a class, and return the words."""
    with pytest.raises(error) as raised:
        function(*args, **kwargs)
    words = str(raised.value)
    assert MPI.COMM_WORLD.allgather(words) == [words] * RANKS
    return words


def meet() -> None:
    """Wait for all ranks without keeping a core from those that work."""
    mpi.Requests([MPI.COMM_WORLD.Ibarrier()]).wait()


@contextmanager
def first_ranks(count):
    """A communicator of the first ranks; None on the others, which wait for them."""
    comm = MPI.COMM_WORLD.Split(0 if count > MPI.COMM_WORLD.rank else MPI.UNDEFINED)
    yield comm if comm != MPI.COMM_NULL else None
    meet()
    if comm != MPI.COMM_NULL:
        comm.Free()


@contextmanager
def shared_folder():
    """The same new folder on all ranks."""
    first = MPI.COMM_WORLD.rank == 0
    path = Path(MPI.COMM_WORLD.bcast(tempfile.mkdtemp() if first else None))
    yield path
    meet()
    if first:
        shutil.rmtree(path)


def communication_threads():
    """Return how many threads of worlds live; others, such as timers of tests, may end."""
    return [thread.name for thread in threading.enumerate()].count("mntrain communication")
