"""The interface to MPI: the only module that imports mpi4py.

Importing mpi4py.MPI loads the MPI library, and starts MPI unless `import_unstarted` has come first.
Data-loader workers import this package too, so functions import it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from mntrain.checks import launcher
from mntrain.checks.host import check_before_mpi, expect, library_missing
from mntrain.comm import clock
from mntrain.comm.exit_functions import leave_end_to_parent

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI
    from numpy.typing import NDArray
    from torch import Tensor

    # Host memory; or flat device memory, for a CUDA-aware MPI.
    Bytes = NDArray[np.uint8] | Tensor

# MPI-3 counts are 32-bit ints: a longer message is sent as several of this many bytes.
MESSAGE_BYTES = 1 << 30
FORWARD_S, MAX_FORWARD_S = 0.5, 3.0  # for launchers to read and forward output before an abort
CHUNK_TAGS = 1 << 10  # consecutive chunks of a communicator whose tags differ
_started = threading.Event()  # MPI, by this package
_of_parent = threading.Event()  # MPI is that of this process's parent


class _MessageTimeline(Protocol):  # a `mntrain.timeline.event_log.EventLog`
    def sent(self, level: str, nbytes: int, messages: int) -> None: ...
    def in_flight(self, level: str) -> Callable[[], None]: ...


@dataclass
class Traffic:
    """Messages and bytes that this rank has sent, by level: {"node": ..., "cross": ...}.

    Of compressed messages to other nodes also the bytes, and those that they stand for; and the
    bytes of the buffers in which messages travel. A `timeline` that is recorded is told of them.
    """

    messages: dict[str, int] = field(default_factory=lambda: {"node": 0, "cross": 0})
    bytes: dict[str, int] = field(default_factory=lambda: {"node": 0, "cross": 0})
    compressed_bytes: int = 0
    before_bytes: float = 0
    buffer_bytes: int = 0
    timeline: _MessageTimeline | None = None

    def count(self, level: str, nbytes: int, messages: int = 1, ratio: float = 1) -> None:
        """Add messages with a total of `nbytes` bytes, each for `ratio` without compression."""
        self.messages[level] += messages
        self.bytes[level] += nbytes
        if ratio != 1 and level == "cross":
            self.compressed_bytes += nbytes
            self.before_bytes += nbytes * ratio
        if self.timeline is not None:
            self.timeline.sent(level, nbytes, messages)

    def at_end(self, level: str) -> tuple[Callable[[], None], ...]:
        """Return what to call when a message to or from this rank that starts now has ended."""
        return () if self.timeline is None else (self.timeline.in_flight(level),)


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
        self._tag_count = tag_count()
        self._duplicates: list[Communicator] = []

    @property
    def as_mpi4py(self) -> MPI.Comm:
        """The MPI communicator itself. Still owned by this object, which uses tags from 1024."""
        return self._comm

    def send(
        self,
        peer: int,
        data: Bytes,
        tag: int = 0,
        *,
        counted: bool = True,
        ended: bool = False,
        ratio: float = 1,
    ) -> Requests:
        """Start to send a buffer, which must not change until the requests are complete.

        A message matches the receive with the same tag. It counts in `traffic` if `counted`, each
        byte for `ratio` without compression. No bytes are no message by default. With `ended`, they
        are one, and the last part has less than MESSAGE_BYTES: a `FoundMessage` needs it.
        """
        parts = _messages(data)
        if ended and data.nbytes % MESSAGE_BYTES == 0:
            parts.append(data[:0])
        if counted:
            self.traffic.count(self.levels[peer], data.nbytes, len(parts), ratio)
        ends = self.traffic.at_end(self.levels[peer])
        return Requests([self._comm.Isend(part, peer, tag) for part in parts], ends)

    def receive(self, peer: int, data: Bytes, tag: int = 0) -> Requests:
        """Start to receive exactly data.nbytes bytes from a peer into `data`; see `send`."""
        parts = _messages(data)
        ends = self.traffic.at_end(self.levels[peer])
        return Requests([self._comm.Irecv(part, peer, tag) for part in parts], ends)

    def gather_unequal(self, own: Bytes, lengths: Sequence[int]) -> tuple[Requests, bytearray]:
        """Start to gather buffers of these lengths, by rank, end to end. Collective. Not counted.

        All ranks must have agreed on the lengths: MPI does not compare them.
        """
        gathered = bytearray(sum(lengths))
        return Requests([self._comm.Iallgatherv(own, (gathered, lengths))]), gathered

    def tags(self, digest: int, chunks: int) -> tuple[int, list[int]]:
        """Reserve the tags of a collective's chunks, in one order on all ranks.

        Return the number of the first chunk among all of this communicator, and the tags. No two
        chunks in flight have the same one. `digest` has 63 bits. Collectives of unequal digests do
        not receive each other's messages, but for the 1 in 2^19 (MPICH), 2^21 (Open MPI) or at
        worst 2^5 that have the same prefix.
        """
        first = self._chunks
        self._chunks += chunks
        prefix = max(1, self._tag_count // CHUNK_TAGS * digest >> 63) * CHUNK_TAGS
        return first, [prefix + number % CHUNK_TAGS for number in range(first, self._chunks)]

    def tag(self, digest: int) -> int:
        """Reserve the tag of a collective in one piece; see `tags`."""
        return self.tags(digest, 1)[1][0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's picklable object, by rank, on every rank. Collective, blocking."""
        # MPI's own collectives spin while they wait; this barrier sleeps.
        Requests([self._comm.Ibarrier()]).wait(self._abandoned)
        return list(self._comm.allgather(value))

    def node_keys(self) -> list[int]:
        """Return, for every rank, the lowest rank that shares memory with it. Collective."""
        from mpi4py import MPI  # noqa: PLC0415 - it loads the library

        shared = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            leader = int(shared.bcast(self.rank))
        finally:
            shared.Free()
        return self.gather(leader)

    def duplicate(self, name: str) -> Communicator:
        """Make a communicator of the same ranks, freed with this one. Collective, blocking.

        Its messages count in the `traffic` of this one.
        """
        copy = Communicator(self._comm.Dup(), name, self._abandoned)
        copy.traffic, copy.levels = self.traffic, self.levels
        self._duplicates.append(copy)
        return copy

    def split(self, color: int, key: int, name: str) -> Communicator:
        """Make a communicator of the ranks with the same color, ordered by key. Collective."""
        return Communicator(self._comm.Split(color, key), name, self._abandoned)

    def abandon(self) -> None:
        """Make `gather` raise RuntimeError, here and in communicators split off. Local."""
        self._abandoned.set()

    def of_members(self, members: Sequence[int], tag: int, name: str) -> Communicator:
        """Make a communicator of some ranks, in this order. Collective over those alone; blocks."""
        group = self._comm.Get_group()
        part = group.Incl(members)
        whole = cast("MPI.Intracomm", self._comm)
        made = Communicator(whole.Create_group(part, tag), name, self._abandoned)
        part.Free()
        group.Free()
        made.traffic, made.levels = self.traffic, [self.levels[rank] for rank in members]
        return made

    def free(self) -> None:
        """Free the MPI communicator. Collective."""
        for copy in self._duplicates:
            copy.free()
        self._comm.Free()


class Requests:
    """Non-blocking operations in flight. `at_end` is called when all are complete."""

    def __init__(
        self, requests: Sequence[MPI.Request], at_end: Sequence[Callable[[], None]] = ()
    ) -> None:
        self._requests, self._at_end = list(requests), at_end

    @classmethod
    def of(cls, *several: Requests) -> Requests:
        """Merge several into one."""
        at_end = [function for requests in several for function in requests._at_end]
        return cls([request for requests in several for request in requests._requests], at_end)

    def test(self) -> bool:
        """Return whether all are complete. Lets MPI progress them."""
        requests = self._requests
        if len(requests) == 1:  # faster than Testall
            done = requests[0].Test()
        else:
            done = not requests or type(requests[0]).Testall(requests)
        if done:
            self._end()
        return done

    def _end(self) -> None:
        self._requests.clear()
        for function in self._at_end:
            function()
        self._at_end = ()

    def wait(self, abandoned: threading.Event | None = None) -> None:
        """Sleep until all are complete. Raises RuntimeError if `abandoned` is set before."""
        backoff = clock.Backoff()
        while not self.test():
            if abandoned is not None and abandoned.is_set():
                raise RuntimeError("this world was abandoned while a rank waited for the others")
            clock.pause(backoff.delay())


class FoundMessage:
    """A message to this rank, whose sender and size are known once it has arrived.

    It is received by its own size. Into a smaller buffer, Open MPI writes beyond the end before it
    tells that a message is too long. A `peer` of None is any. `source` and `nbytes` are valid after
    its arrival. A long message has several parts, which are found one after the other; `nbytes` is
    of the part that was found last. Whoever receives the parts sets `complete` with the last one.
    """

    def __init__(self, comm: MPI.Comm, peer: int | None, tag: int) -> None:
        from mpi4py import MPI  # noqa: PLC0415 - it loads the library

        self._any, self._comm = MPI.ANY_SOURCE, comm
        self.peer, self.tag = peer, tag
        self._status, self._byte = MPI.Status(), MPI.BYTE
        self._message: MPI.Message | None = None
        self.source, self.nbytes = -1, -1
        self.complete = False

    @property
    def is_last(self) -> bool:
        """True if the part that was found ends the message."""
        return self.nbytes < MESSAGE_BYTES

    def overlaps(self, other: FoundMessage) -> bool:
        """Return whether one message could be both of these, of one communicator."""
        any_peer = None in (self.peer, other.peer)
        return self.tag == other.tag and (any_peer or self.peer == other.peer)

    def arrived(self, peer: int | None = None) -> bool:
        """Return whether the next part is here, from one peer if given. Lets MPI progress."""
        peer = self.peer if peer is None else peer
        peer = self._any if peer is None else peer
        self._message = self._comm.Improbe(peer, self.tag, self._status)
        if self._message is None:
            return False
        self.source = self._status.Get_source()
        self.nbytes = self._status.Get_count(self._byte)
        return True

    def receive(self, data: Bytes) -> Requests:
        """Start to receive the part that was found into `data`, of as many bytes."""
        assert self._message is not None
        return Requests([self._message.Irecv(data)])


def tag_count() -> int:
    """Return the number of tags that MPI has, from 0 on. MPI runs."""
    from mpi4py import MPI  # noqa: PLC0415 - it loads the library

    highest = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # in Open MPI other communicators lack it
    assert highest is not None
    return int(highest) + 1


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


# Settings that Open MPI reads at its start, unless the user has set them.
OPEN_MPI = {
    "mpi_yield_when_idle": "1",  # waiting ranks yield the core
    "osc": "^ucx",  # UCX prints warnings where it has no network device
    # TCP messages of up to 4 MiB are sent eagerly. By default those over 64 KiB wait for a reply,
    # which takes until the receiver calls MPI.
    "btl_tcp_eager_limit": str(4 << 20),
}
THREADS = {0: "single", 1: "funneled", 2: "serialized", 3: "multiple"}


def of_parent() -> bool:
    """Return whether this process is a forked child of a rank, which MPI does not know. Local."""
    return _of_parent.is_set()


def start(comm: MPI.Intracomm | None = None) -> tuple[Communicator, MpiLibrary]:
    """Start MPI unless it runs, and duplicate `comm` (by default that of all ranks).

    Collective over `comm`, which stays the caller's. Raises StartError before MPI starts where MPI
    would end the process, and after it if the launcher started more ranks than MPI sees; ValueError
    for the null communicator; RuntimeError if MPI was started without support for communication
    from several threads, and in a forked child.
    """
    if of_parent():
        raise RuntimeError(
            "this process is a forked child of a rank and cannot be a rank itself: call "
            "`mntrain.init` before the fork, and leave communication to the rank"
        )
    MPI = _import_started()  # noqa: N806 - a module
    expect(launcher.world_size(os.environ, MPI.COMM_WORLD.Get_size()))
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


def _import_started() -> ModuleType:
    """Return mpi4py's module MPI; start MPI unless it runs. Raises StartError where it cannot."""
    for name, value in OPEN_MPI.items():
        os.environ.setdefault(f"OMPI_MCA_{name}", value)
    MPI = import_unstarted()  # noqa: N806 - a module
    from mpi4py import rc  # noqa: PLC0415 - as above

    if not MPI.Is_initialized():
        check_before_mpi(MPI.Get_library_version())
        levels = {name: number for number, name in THREADS.items()}
        level = levels.get(rc.thread_level, MPI.THREAD_MULTIPLE)
        _wait_until_all_ranks_have_started_mpi(MPI, level)
    _leave_end_to_parent(MPI)
    return MPI


@cache
def _leave_end_to_parent(MPI: ModuleType) -> None:  # noqa: N803 - a module
    """Let forked children end without ending MPI, which is the rank's: by mpi4py or by a call."""
    leave_end_to_parent(str(MPI.__file__))

    def forget() -> None:
        _of_parent.set()
        atexit.unregister(MPI.Finalize)
        vars(MPI)["Finalize"] = lambda: None

    os.register_at_fork(after_in_child=forget)


def _wait_until_all_ranks_have_started_mpi(MPI: ModuleType, level: int) -> None:  # noqa: N803
    MPI.Init_thread(level)  # its name is for the stack of a rank that waits too long
    _started.set()


def ended() -> bool:
    """Return whether the user has ended MPI, which runs or has run. Local."""
    from mpi4py import MPI  # noqa: PLC0415 - it loads the library

    return bool(MPI.Is_finalized())


def finalize() -> None:
    """End MPI if this package has started it and the user leaves the end to it. Collective."""
    from mpi4py import MPI, rc  # noqa: PLC0415 - it loads the library

    if _started.is_set() and rc.finalize and not MPI.Is_finalized():
        _wait_until_all_ranks_have_ended_mpi(MPI)


def _wait_until_all_ranks_have_ended_mpi(MPI: ModuleType) -> None:  # noqa: N803
    MPI.Finalize()  # its name is for the stack of a rank that waits too long


def import_unstarted() -> ModuleType:
    """Return mpi4py's module MPI; its import does not start MPI, but its exit ends it. Local.

    Raises StartError if no MPI library can be loaded.
    """
    from mpi4py import rc  # noqa: PLC0415 - as below

    if rc.initialize:
        rc.initialize = False
        rc.finalize = rc.finalize in (None, True)
    try:
        from mpi4py import MPI  # noqa: PLC0415 - it loads the library
    except (ImportError, RuntimeError) as error:
        raise library_missing(str(error)) from error
    return MPI


def barrier() -> None:
    """Wait for every rank of the job; start MPI unless it runs. Collective. Raises StartError."""
    _import_started().COMM_WORLD.Barrier()


def unlink_segments(met: int) -> None:
    """Remove the names of the files in which MPICH's ranks of a host share memory. Local.

    Unless there are more ranks than those that have met, all have started MPI and mapped them. Then
    the kernel frees the memory with the last process, however the job ends. MPICH itself removes
    them only at a clean end.
    """
    if met < job_size():
        return
    with suppress(OSError):  # no Linux; or another rank was faster
        maps = Path("/proc/self/maps").read_bytes()
        for name in re.findall(rb"/dev/shm/mpich_shm_\w+$", maps, re.MULTILINE):
            Path(os.fsdecode(name)).unlink(missing_ok=True)


def job_size() -> int:
    """Return the number of ranks that MPI sees, of which a world may have a part. MPI runs."""
    from mpi4py import MPI  # noqa: PLC0415 - it loads the library

    return MPI.COMM_WORLD.Get_size()


def comm_of_one() -> MPI.Intracomm:
    """Return the communicator of this rank alone."""
    from mpi4py import MPI  # noqa: PLC0415 - it loads the library

    return MPI.COMM_SELF


def abort(code: int) -> None:
    """End every rank of the job with an exit code, once the launcher has read the output so far.

    What it has not forwarded before an abort may be lost.
    """
    from mpi4py import MPI  # noqa: PLC0415 - it loads the library

    deadline = time.monotonic() + MAX_FORWARD_S
    while (_unread(1) or _unread(2)) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(FORWARD_S)
    MPI.COMM_WORLD.Abort(code)


def _unread(descriptor: int) -> int:
    """Return the bytes in a pipe; 0 for what is none."""
    try:
        found = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(found, sys.byteorder)
