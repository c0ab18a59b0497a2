"""The interface to MPI: the only module that imports mpi4py.

Importing mpi4py.MPI starts MPI. Data-loader workers import this package too, so the import is
deferred to `start`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI
    from numpy.typing import NDArray
    from torch import Tensor

    # Host memory; or flat device memory, for a CUDA-aware MPI.
    Bytes = NDArray[np.uint8] | Tensor

# MPI-3 counts are 32-bit ints: a longer message is sent as several of this many bytes.
MESSAGE_BYTES = 1 << 30
TAGS = 1 << 15  # supported by every MPI
_libc = ctypes.CDLL(None)


@dataclass
class Traffic:
    """Messages and bytes that this rank has sent, by level: {"node": ..., "cross": ...}."""

    messages: dict[str, int] = field(default_factory=lambda: {"node": 0, "cross": 0})
    bytes: dict[str, int] = field(default_factory=lambda: {"node": 0, "cross": 0})

    def count(self, level: str, nbytes: int, messages: int = 1) -> None:
        """Add messages with a total of `nbytes` bytes."""
        self.messages[level] += messages
        self.bytes[level] += nbytes


class Communicator:
    """A group of ranks that exchange bytes and small Python objects. Owns its MPI communicator.

    `levels[peer]` is the level that a message to that peer counts for in `traffic`: "node" or
    "cross". Free it collectively with `free`; afterwards it is unusable.
    """

    def __init__(self, comm: MPI.Comm, name: str, abandoned: threading.Event | None = None) -> None:
        comm.Set_name(f"mntrain {name}")
        self._comm = comm
        self._abandoned = abandoned or threading.Event()
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.traffic = Traffic()
        self.levels: Sequence[str] = ["cross"] * self.size
        self._chunks = 0  # numbered so far, the same on all ranks

    @property
    def as_mpi4py(self) -> MPI.Comm:
        """The MPI communicator itself, for measurements of MPI. Still owned by this object."""
        return self._comm

    def send(self, peer: int, data: Bytes, tag: int = 0) -> Requests:
        """Start to send a buffer, which must not change until the requests are complete.

        `tag` is from 0 to TAGS - 1; a message matches the receive with the same tag.
        """
        parts = _messages(data)
        self.traffic.count(self.levels[peer], data.nbytes, messages=len(parts))
        return Requests([self._comm.Isend(part, peer, tag) for part in parts])

    def receive(self, peer: int, data: Bytes, tag: int = 0) -> Requests:
        """Start to receive exactly data.nbytes bytes from a peer into `data`."""
        return Requests([self._comm.Irecv(part, peer, tag) for part in _messages(data)])

    def all_gather(self, rows: Bytes) -> Requests:
        """Start to gather equal rows of bytes; this rank's is in place already. Collective.

        Counts as a message to every other rank.
        """
        self._count_to_all(rows.nbytes // self.size)
        return Requests([self._comm.Iallgather(None, rows)])  # None: in place

    def broadcast(self, data: Bytes, root: int) -> Requests:
        """Start to copy the root's bytes to every rank. Collective.

        Counts as a message from the root to every other rank.
        """
        if self.rank == root:
            self._count_to_all(data.nbytes)
        return Requests([self._comm.Ibcast(data, root)])

    def number_chunks(self, count: int) -> int:
        """Reserve numbers for `count` chunks, in one order on all ranks, and return the first.

        Modulo TAGS they are the tags of the chunks' messages.
        """
        self._chunks += count
        return self._chunks - count

    def gather_objects(self, local: Any) -> list[Any]:
        """Return every rank's picklable object, by rank, on every rank. Collective, blocking."""
        # MPI's own collectives spin while they wait; this barrier sleeps.
        Requests([self._comm.Ibarrier()]).wait(self._abandoned)
        return list(self._comm.allgather(local))

    def node_keys(self) -> list[int]:
        """Return, for every rank, the lowest rank that shares memory with it. Collective."""
        from mpi4py import MPI  # noqa: PLC0415 - it starts MPI

        shared = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            leader = int(shared.bcast(self.rank))
        finally:
            shared.Free()
        return self.gather_objects(leader)

    def split(self, color: int, key: int, name: str) -> Communicator:
        """Make a communicator of the ranks with the same color, ordered by key. Collective."""
        return Communicator(self._comm.Split(color, key), name, self._abandoned)

    def abandon(self) -> None:
        """Make `gather_objects` raise RuntimeError, here and in communicators split off. Local."""
        self._abandoned.set()

    def free(self) -> None:
        """Free the MPI communicator. Collective."""
        self._comm.Free()

    def _count_to_all(self, nbytes: int) -> None:
        for level, others in self._others.items():
            self.traffic.count(level, others * nbytes, messages=others)

    @cached_property
    def _others(self) -> dict[str, int]:
        """The number of other ranks at each level."""
        others = Counter(self.levels)
        others[self.levels[self.rank]] -= 1
        return others


class Requests:
    """Non-blocking operations in flight."""

    def __init__(self, requests: Sequence[MPI.Request]) -> None:
        self._requests = list(requests)

    @classmethod
    def of(cls, *several: Requests) -> Requests:
        """Merge several into one."""
        return cls([request for requests in several for request in requests._requests])

    def test(self) -> bool:
        """Return whether all are complete. Lets MPI progress them."""
        requests = self._requests
        if len(requests) == 1:  # faster than Testall
            done = requests[0].Test()
        else:
            done = not requests or type(requests[0]).Testall(requests)
        if done:
            requests.clear()
        return done

    def wait(self, abandoned: threading.Event | None = None) -> None:
        """Sleep until all are complete. Raises RuntimeError if `abandoned` is set before."""
        backoff = Backoff()
        while not self.test():
            if abandoned is not None and abandoned.is_set():
                raise RuntimeError("this world was abandoned while a rank waited for the others")
            pause(backoff.delay())


def pause(seconds: float) -> None:
    """Sleep and release the GIL; for 0 s, only yield the core to another thread or process.

    (time.sleep(0) would take about 100 us, since it sets a timer.)
    """
    if seconds:
        time.sleep(seconds)
    else:
        _libc.sched_yield()


class WaitPolicy(NamedTuple):
    """Polling without sleeps for `eager_s` seconds, then with sleeps up to `max_sleep_s`."""

    eager_s: float
    max_sleep_s: float


# For a caller that waits for one collective only; for one of several, while other ranks may still
# compute on this core; for the engine's thread, while its own rank computes.
LATENCY_BOUND = WaitPolicy(2e-3, 0.3e-3)
BANDWIDTH_BOUND = WaitPolicy(0, 1e-3)
BACKGROUND = WaitPolicy(0, 4e-3)
MIN_SLEEP_S, MAX_INTERVAL_S = 20e-6, 4 * BACKGROUND.max_sleep_s


class Backoff:
    """The time to sleep before the next test: a fraction of recent intervals and of this wait."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._interval_s = 0.0  # moving average of the time between completions

    def begin(self) -> None:
        """Start a wait, after a time in which there was nothing to wait for."""
        self._since = time.perf_counter()

    def reset(self) -> None:
        """Note a completion."""
        now = time.perf_counter()
        self._interval_s += (min(now - self._since, MAX_INTERVAL_S) - self._interval_s) / 4
        self._since = now

    def delay(self, policy: WaitPolicy = LATENCY_BOUND) -> float:
        """Return the seconds to sleep now; 0 while polling is eager."""
        waited_s = time.perf_counter() - self._since
        if waited_s < policy.eager_s:
            return 0.0
        return min(max(self._interval_s / 4, waited_s / 8, MIN_SLEEP_S), policy.max_sleep_s)


def _messages(data: Bytes) -> list[Bytes]:
    if 0 < data.nbytes <= MESSAGE_BYTES:
        return [data]
    return [data[low : low + MESSAGE_BYTES] for low in range(0, data.nbytes, MESSAGE_BYTES)]


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI library in use."""

    name: str
    threads: str  # the thread level, for example "multiple"
    build: str  # its full version string


# Variables with the number of ranks that were started, the most specific launcher first: mpirun
# within a Slurm job states how many it started itself.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


class SilentSingletonsError(RuntimeError):
    """The launcher started more ranks than MPI sees: each rank would be a world of its own."""


def check_launcher(environment: Mapping[str, str], size: int) -> None:
    """Compare the size of the world with the launcher's environment. Local.

    Raises SilentSingletonsError if the launcher started more ranks. PMIx states no size, but a rank
    number beyond this world reveals the mismatch.
    """
    values = {name: environment.get(name, "") for name in (*SIZE_VARIABLES, "PMIX_RANK")}
    variable = next((name for name, value in values.items() if value.isdigit()), "")
    started = int(values[variable]) + (variable == "PMIX_RANK") if variable else 1
    if started > size:
        raise SilentSingletonsError(
            f"the launcher started {started} ranks ({variable}={values[variable]}), but MPI sees a "
            f"world of {size}: the launcher and this Python's MPI library do not know each other, "
            "so every rank would train alone. Use the mpirun of the same MPI (with a pip wheel: "
            "the one next to this python), or under Slurm the matching plugin: srun --mpi=pmix for "
            f"Open MPI, --mpi=pmi2 for MPICH. To run one rank on purpose, unset {variable}"
        )


# Settings that Open MPI reads at its start, unless the user has set them.
OPEN_MPI = {
    "mpi_yield_when_idle": "1",  # waiting ranks yield the core
    "osc": "^ucx",  # UCX prints warnings where it has no network device
    # TCP messages of up to 4 MiB are sent eagerly. By default those over 64 KiB wait for a reply,
    # which takes until the receiver calls MPI.
    "btl_tcp_eager_limit": str(4 << 20),
}
THREADS = {0: "single", 1: "funneled", 2: "serialized", 3: "multiple"}


def start(comm: MPI.Intracomm | None = None) -> tuple[Communicator, MpiLibrary]:
    """Start MPI unless it runs, and duplicate `comm` (by default that of all ranks).

    Collective over `comm`, which stays the caller's. Raises SilentSingletonsError if the launcher's
    environment states more ranks than MPI sees, ValueError for the null communicator, RuntimeError
    if MPI was started without support for communication from several threads.
    """
    for name, value in OPEN_MPI.items():
        os.environ.setdefault(f"OMPI_MCA_{name}", value)
    from mpi4py import MPI  # noqa: PLC0415 - it starts MPI

    check_launcher(os.environ, MPI.COMM_WORLD.Get_size())
    level = THREADS.get(MPI.Query_thread(), "unknown")
    if level not in ("serialized", "multiple"):
        raise RuntimeError(
            f"MPI was started with thread level {level!r}, and communication needs a thread of its "
            "own: ask for MPI_THREAD_MULTIPLE (mpi4py does unless mpi4py.rc says otherwise)"
        )
    vendor, version = MPI.get_vendor()
    library = f"{vendor} {'.'.join(map(str, version))}"
    given = MPI.COMM_WORLD if comm is None else comm
    if given == MPI.COMM_NULL:
        raise ValueError(
            "the communicator is the null communicator: this rank has no part in it; make the "
            "world on its members only"
        )
    return Communicator(given.Dup(), "world"), MpiLibrary(library, level, MPI.Get_library_version())


def barrier() -> None:
    """Wait for every rank of the job; start MPI unless it runs. Collective."""
    from mpi4py import MPI  # noqa: PLC0415 - it starts MPI

    MPI.COMM_WORLD.Barrier()


def abort(code: int) -> None:
    """End every rank of the job immediately with an exit code."""
    from mpi4py import MPI  # noqa: PLC0415 - it starts MPI

    MPI.COMM_WORLD.Abort(code)
