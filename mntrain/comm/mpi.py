"""MPI, behind a small door: the only module that imports mpi4py, and only when a world is made.

Importing mpi4py.MPI starts MPI; data-loader workers import this package too, so the import waits
for `start`.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI
    from numpy.typing import NDArray
    from torch import Tensor

    # Of host memory; or of a device's, flat, for an MPI that takes it.
    Bytes = NDArray[np.uint8] | Tensor

# MPI-3 counts are 32-bit ints: a longer message goes as several of this many bytes.
MESSAGE_BYTES = 1 << 30
TAGS = 1 << 15  # that every MPI has
_libc = ctypes.CDLL(None)


class SilentSingletonsError(RuntimeError):
    """The launcher started more ranks than this MPI sees: N worlds of one, each all alone."""


@dataclass
class Traffic:
    """What this rank has sent, by level: {"node": ..., "cross": ...}."""

    messages: dict[str, int] = field(default_factory=lambda: {"node": 0, "cross": 0})
    bytes: dict[str, int] = field(default_factory=lambda: {"node": 0, "cross": 0})

    def count(self, level: str, nbytes: int, messages: int = 1) -> None:
        """Add messages, of so many bytes in all."""
        self.messages[level] += messages
        self.bytes[level] += nbytes


class Communicator:
    """A group of ranks that exchange bytes and small Python objects. Owns its MPI communicator.

    `levels[peer]` says at which level a message to that peer travels, for `traffic`. Free it with
    `free`, collectively; afterwards it is unusable.
    """

    def __init__(self, comm: MPI.Comm, name: str) -> None:
        comm.Set_name(f"mntrain {name}")
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.traffic = Traffic()
        self.levels: Sequence[str] = ["cross"] * self.size

    @property
    def as_mpi4py(self) -> MPI.Comm:
        """The MPI communicator itself, for who measures MPI. Not to be freed."""
        return self._comm

    def exchange(
        self, sends: Iterable[tuple[int, Bytes]], receives: Iterable[tuple[int, Bytes]]
    ) -> None:
        """Send and receive, all in flight together: pairs of a peer and its bytes.

        Returns when every receive is filled and every send's buffer is free again. Empty buffers
        send nothing. Between one pair of ranks, messages arrive in the order of the lists.
        """
        incoming = [self.receive(peer, data) for peer, data in receives]
        outgoing = [self.send(peer, data) for peer, data in sends]
        Requests.of(*incoming, *outgoing).wait()

    def send(self, peer: int, data: Bytes, tag: int = 0) -> Requests:
        """Start sending bytes to a peer. The buffer is lent until the flight is over.

        `tag` is from 0 to TAGS - 1: a message meets the receive of its own tag.
        """
        parts = _messages(data)
        self.traffic.count(self.levels[peer], data.nbytes, messages=len(parts))
        return Requests([self._comm.Isend(part, peer, tag) for part in parts])

    def receive(self, peer: int, data: Bytes, tag: int = 0) -> Requests:
        """Start receiving exactly data.nbytes bytes from a peer into data."""
        return Requests([self._comm.Irecv(part, peer, tag) for part in _messages(data)])

    def gather(self, room: Bytes) -> Requests:
        """Start gathering everyone's bytes, of one length, by rank in `room`. Collective.

        This rank's lie at its place already. Counts as a message to every other rank.
        """
        self._count_to_all(room.nbytes // self.size)
        return Requests([self._comm.Iallgather(None, room)])  # None: in place

    def broadcast(self, data: Bytes, root: int) -> Requests:
        """Start bringing the root's bytes to everyone. Collective.

        Counts as a message of the root's to every other rank.
        """
        if self.rank == root:
            self._count_to_all(data.nbytes)
        return Requests([self._comm.Ibcast(data, root)])

    def gather_objects(self, mine: Any) -> list[Any]:
        """Everyone's object, by rank, on every rank. Collective, blocking; for small things."""
        Requests([self._comm.Ibarrier()]).wait()  # MPI's own collectives spin for who is late
        return list(self._comm.allgather(mine))

    def node_keys(self) -> list[int]:
        """For every rank, the lowest rank with which it shares memory. Collective."""
        from mpi4py import MPI  # noqa: PLC0415

        shared = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            leader = int(shared.bcast(self.rank))
        finally:
            shared.Free()
        return self.gather_objects(leader)

    def split(self, color: int, key: int, name: str) -> Communicator:
        """The ranks that gave the same color, in the order of their keys. Collective."""
        return Communicator(self._comm.Split(color, key), name)

    def _count_to_all(self, nbytes: int) -> None:
        for level, others in self._others.items():
            self.traffic.count(level, others * nbytes, messages=others)

    @cached_property
    def _others(self) -> dict[str, int]:
        """How many other ranks there are at each level."""
        others = Counter(self.levels)
        others[self.levels[self.rank]] -= 1
        return others

    def free(self) -> None:
        """Give the MPI communicator back. Collective."""
        self._comm.Free()


class Requests:
    """Messages under way."""

    def __init__(self, requests: Sequence[MPI.Request]) -> None:
        self._requests = list(requests)

    @classmethod
    def of(cls, *flights: Requests) -> Requests:
        """Several flights as one."""
        return cls([request for flight in flights for request in flight._requests])

    def over(self) -> bool:
        """Whether all messages have arrived, or left. Gives MPI a chance to move them."""
        requests = self._requests
        if len(requests) == 1:  # sooner than one by Testall
            done = requests[0].Test()
        else:
            done = not requests or type(requests[0]).Testall(requests)
        if done:
            requests.clear()
        return done

    def wait(self) -> None:
        """Return when the flight is over. Sleeps while there is nothing to do."""
        patience = Backoff()
        while not self.over():
            pause(patience.delay())


def pause(seconds: float) -> None:
    """Sleep; for no time, let another thread or process that is ready have the core.

    Lets go of Python's lock. (A sleep of 0 s would take some 100 us, for it sets a timer.)
    """
    if seconds:
        time.sleep(seconds)
    else:
        _libc.sched_yield()


class WaitPolicy(NamedTuple):
    """How to wait for MPI: ask again and again for so long, then sleep between questions."""

    eager_s: float
    most_s: float  # of sleep, at a time


# Who waits for one thing only; for several, of which some are always under way, while other ranks
# may still compute on the core; and who has a thread beside that computes itself.
LATENCY_BOUND, BANDWIDTH_BOUND, BACKGROUND = (
    WaitPolicy(2e-3, 0.3e-3),
    WaitPolicy(0, 1e-3),
    WaitPolicy(0, 4e-3),
)
LEAST_SLEEP_S, PACE_S = 20e-6, 4 * BACKGROUND.most_s


class Backoff:
    """How long to sleep before the next question, so that waiting costs others little.

    A part of the time that the last answers took, and of the time waited for this one.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._pace = 0.0  # seconds between the last answers, the latest counting most

    def begin(self) -> None:
        """Note that there is something to wait for, after a while in which there was nothing."""
        self._since = time.perf_counter()

    def reset(self) -> None:
        """Note that something has happened."""
        now = time.perf_counter()
        self._pace += (min(now - self._since, PACE_S) - self._pace) / 4
        self._since = now

    def delay(self, manner: WaitPolicy = LATENCY_BOUND) -> float:
        """Seconds to sleep now: none while it is to ask eagerly."""
        waited = time.perf_counter() - self._since
        if waited < manner.eager_s:
            return 0.0
        return min(max(self._pace / 4, waited / 8, LEAST_SLEEP_S), manner.most_s)


def _messages(data: Bytes) -> list[Bytes]:
    if 0 < data.nbytes <= MESSAGE_BYTES:
        return [data]
    return [data[low : low + MESSAGE_BYTES] for low in range(0, data.nbytes, MESSAGE_BYTES)]


@dataclass(frozen=True)
class MpiLibrary:
    """Which MPI runs, and what its threads may do."""

    name: str
    threads: str
    build: str  # what it says of itself, in full


# What Open MPI reads as it starts, unless the user has said otherwise.
OPEN_MPI = {
    "mpi_yield_when_idle": "1",  # waiting ranks yield the core
    "osc": "^ucx",  # windows leave UCX out, which complains where it has no network device
    # Over TCP, messages of up to 4 MiB are sent at once. Longer ones than 64 KiB, its default,
    # would wait for an answer, which takes until the other rank asks MPI.
    "btl_tcp_eager_limit": str(4 << 20),
}
THREADS = {0: "single", 1: "funneled", 2: "serialized", 3: "multiple"}


def start(comm: MPI.Intracomm | None = None) -> tuple[Communicator, MpiLibrary]:
    """Start MPI if nobody has, and give a duplicate of `comm` (of the world by default).

    Collective over `comm`, which stays the caller's. Raises SilentSingletonsError when the
    launcher's environment says that the world should have more ranks than it has, ValueError for
    the null communicator.
    """
    for name, value in OPEN_MPI.items():
        os.environ.setdefault(f"OMPI_MCA_{name}", value)
    from mpi4py import MPI  # noqa: PLC0415

    check_launcher(os.environ, MPI.COMM_WORLD.Get_size())
    level = THREADS.get(MPI.Query_thread(), "unknown")
    if level not in ("serialized", "multiple"):
        raise RuntimeError(
            f"MPI was started with thread level {level!r}, and communication needs a thread of its "
            "own: ask for MPI_THREAD_MULTIPLE (mpi4py does unless mpi4py.rc says otherwise)"
        )
    vendor, version = MPI.get_vendor()
    name = f"{vendor} {'.'.join(map(str, version))}"
    given = MPI.COMM_WORLD if comm is None else comm
    if given == MPI.COMM_NULL:
        raise ValueError(
            "the communicator is the null communicator: this rank has no part in it; make the "
            "world on its members only"
        )
    return Communicator(given.Dup(), "world"), MpiLibrary(name, level, MPI.Get_library_version())


def barrier() -> None:
    """Wait until every rank of the job is here; start MPI for it if nobody has. Collective."""
    from mpi4py import MPI  # noqa: PLC0415

    MPI.COMM_WORLD.Barrier()


def abort(code: int) -> None:
    """End every rank of the job, now."""
    from mpi4py import MPI  # noqa: PLC0415

    MPI.COMM_WORLD.Abort(code)


# The most specific launcher first: mpirun within a Slurm job says how many it started itself.
SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
)


def check_launcher(environment: Mapping[str, str], size: int) -> None:
    """Compare the world's size with what the launcher's environment says. Local.

    Raises SilentSingletonsError when the launcher started more. PMIx states no size, but a rank
    above those of this world gives the mismatch away.
    """
    for variable in SIZE_VARIABLES:
        value = environment.get(variable, "")
        if value.isdigit():
            expected = int(value)
            if expected > size:
                raise SilentSingletonsError(_singletons(f"{variable}={value}", expected, size))
            return
    pmix = environment.get("PMIX_RANK", "")
    if pmix.isdigit() and int(pmix) >= size:
        raise SilentSingletonsError(_singletons(f"PMIX_RANK={pmix}", int(pmix) + 1, size))


def _singletons(evidence: str, expected: int, size: int) -> str:
    return (
        f"the launcher started {expected} ranks ({evidence}), but MPI sees a world of {size}: the "
        "launcher and this Python's MPI library do not know each other, so every rank would train "
        "alone. Use the mpirun of the same MPI (with a pip wheel: the one beside this python), or "
        "under Slurm the matching plugin: srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH. To "
        f"run one rank on purpose, unset {evidence.partition('=')[0]}"
    )
