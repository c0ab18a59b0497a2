"""The recorder of a rank: its last events, in memory and in a file that outlives the process.

Events go to a ring in memory from the start, and to a file once there is a place for it. The kernel
keeps what was written to it when the process is killed, and writes it to disk within about 30 s, so
a node that loses power loses about as much. `mntrain.recorder.recording` describes the file.

The file is not mapped into memory: on a full disk that copies on write, or where the file was cut,
a write to mapped memory ends the process. Once the file has not taken a record, which a full disk
may need long to tell, it gets the whole ring with a sign of life, as soon as it takes that.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import os
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOSPC
from importlib.util import find_spec
from io import FileIO
from itertools import count
from pathlib import Path
from signal import Signals
from typing import Any, Protocol
from weakref import WeakMethod, finalize

from mntrain.recorder.recording import (
    ALL_RANKS,
    CAPACITY,
    FILE_BYTES,
    HEADER_BYTES,
    JOB,
    RECORD,
    RECORD_BYTES,
    RING_BYTES,
    SIGNS,
    SITE,
    Header,
    Kind,
)
from mntrain.recorder.stacks import stack_of

SIGN_S = 1.0  # between two signs of life
CLOSE_S = 5.0  # for the thread that gives them, whose disk may not answer
_MAX_PATH = 400  # of the counter of out-of-memory kills, so that the header fits
_SHARED_ERRORS = {"AgreedError", "RemoteRankError"}  # raised by several ranks together
# Of a library whose calls keep the interpreter's lock: os.pwrite would hand it to another thread at
# each event, and wait for it.
_pwrite = ctypes.PyDLL(None).pwrite64
_pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_pwrite.restype = ctypes.c_ssize_t
_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID")
# Beginnings of files in which a call is not the user's, and of those in which it need not be.
INTERNAL = (
    *(
        os.path.dirname(spec.origin) + os.sep
        for spec in map(find_spec, ("mntrain", "zero", "torch"))
        if spec is not None and spec.origin is not None
    ),
    contextlib.__file__,
    "<frozen",  # the interpreter's own modules, such as runpy
)
LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))


class _CallTimeline(Protocol):  # a `mntrain.timeline.event_log.EventLog`; tickets are of `comm`
    def span(self, name: str, start: float) -> None: ...
    def begin(self, stream: str, ticket: Any) -> None: ...
    def finish(self, ticket: Any) -> None: ...
    def enter(self, ticket: Any) -> None: ...


class Recorder:
    """Records the events of one rank. All methods are local, and none raises.

    Methods may be called by any thread and in signal handlers; one takes 2 to 5 us. The thread that
    constructs it is the one that trains. `timeline` is that of one that is recorded, else None.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.timeline: _CallTimeline | None = None
        self._thread = threading.get_ident()
        self._ring = bytearray(RING_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._ring))
        self._file = -1  # descriptor
        self._complete = False  # the file has all of the ring, and gets each record at once
        self._numbers, self._sign_numbers = count(1), count(1)  # next() is atomic
        self._recording = True
        self._phase = ""  # in progress, the innermost
        self.active_at = time.monotonic()
        """Time at which this rank last began or ended a collective, or a part of a step."""
        self._closed = threading.Event()
        self._signs: threading.Thread | None = None
        # Closes the file in which faulthandler notes crashes of native code, once that is disabled
        # or has another file: it alone holds this one.
        self._crashes: finalize[Any, Any] | None = None

    @property
    def opened(self) -> bool:
        """True once events go into a file."""
        return self._file != -1

    def open(self, folder: Path, job: str) -> str:
        """Record into a file of a folder from here on; return why that is not possible, or "".

        Replaces the file of an earlier job. `job` is the same for all ranks of this job only.
        """
        path = folder / f"rank-{self.rank:05}.bin"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)  # of a process with this number that was killed
            with temporary.open("xb", buffering=0) as file:  # follows no link
                os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
                if file.write(self._header(job).to_bytes() + self._ring) < FILE_BYTES:
                    raise OSError(ENOSPC, os.strerror(ENOSPC))
                os.replace(temporary, path)
                self._file = os.dup(file.fileno())
                if not faulthandler.is_enabled():  # as the user has it: then on stderr
                    os.lseek(self._file, FILE_BYTES, os.SEEK_SET)
                    crashes = FileIO(os.dup(self._file), "wb", closefd=False)
                    self._crashes = finalize(crashes, os.close, crashes.fileno())
                    self._crashes.atexit = False
                    faulthandler.enable(crashes, all_threads=False)
            self._write_missing()  # events that have come meanwhile
            signs = threading.Thread(target=self._give_signs, name="mntrain recorder", daemon=True)
            signs.start()
        # Not every system has posix_fallocate; RuntimeError: no thread can be started.
        except (OSError, AttributeError, RuntimeError) as error:
            self._complete = False
            self._note_no_crash()
            self._close_file()
            for left in (temporary, path):  # that of an earlier job would be taken for this one's
                with suppress(OSError):
                    left.unlink(missing_ok=True)
            return f"{folder}: {getattr(error, 'strerror', error)}"
        self._signs = signs
        end = WeakMethod(self.close)
        atexit.register(lambda: (method := end()) and method())
        return ""

    def _header(self, job: str) -> Header:
        pid = os.getpid()
        oom_file, kills = own_oom_kills()
        return Header(
            self.rank,
            self.size,
            job,
            host=socket.gethostname(),
            pid=pid,
            process_start=process_start(pid),
            boot=boot_id(),
            pid_namespace=pid_namespace(),
            wall=time.time(),
            monotonic=time.monotonic(),
            oom_file=oom_file,
            oom_kills=kills,
            jobs={name: os.environ[name][:40] for name in _JOB_VARIABLES if name in os.environ},
        )

    def collective_begins(
        self, stream: str, number: int, text: str, site: str, awaited: int = ALL_RANKS
    ) -> None:
        """Record that a collective of a stream begins."""
        self._write(Kind.COLLECTIVE_BEGINS, (number, awaited), stream, text, site)

    def collective_ends(self, stream: str, number: int) -> None:
        """Record that a collective of a stream is done."""
        self._write(Kind.COLLECTIVE_ENDS, (number, ALL_RANKS), stream)

    def begin_phase(self, name: str, step: int = 0) -> None:
        """Record that a phase begins; step 0 is none."""
        self._write(Kind.PHASE_BEGINS, (step, ALL_RANKS), name)

    @contextmanager
    def phase(self, name: str, step: int = 0) -> Iterator[None]:
        """Record the begin of a phase, and its end unless the block raises."""
        self.begin_phase(name, step)
        start = time.perf_counter()
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer
        self.span(name, start)
        self._write(Kind.PHASE_ENDS, (0, ALL_RANKS), name)

    def span(self, name: str, start: float) -> None:
        """Tell a timeline what the calling thread has done since a time of `perf_counter`."""
        self.active_at = time.monotonic()
        if self.timeline is not None and name != self._phase:  # which is told as a whole
            self.timeline.span(name, start)

    def signal_arrived(self, number: int) -> None:
        """Record a signal."""
        self._write(Kind.SIGNAL, (number, ALL_RANKS), "", Signals(number).name)

    def error_raised(self, error: BaseException) -> None:
        """Record an exception that ends the world, with the user's innermost line."""
        shared = not _SHARED_ERRORS.isdisjoint(kind.__name__ for kind in type(error).__mro__)
        frames = reversed(traceback.extract_tb(error.__traceback__))
        site = _site_or_first((frame.filename, frame.lineno) for frame in frames)
        kind = Kind.SHARED_ERROR if shared else Kind.ERROR
        self._write(kind, (0, ALL_RANKS), "", f"{type(error).__name__}: {error}", site)

    def job_ended(self, reason: str) -> None:
        """Record why this rank ends the job for all."""
        self._write(Kind.SHARED_ERROR, (0, ALL_RANKS), JOB, reason)

    def peer_ended(self, rank: int) -> None:
        """Record that the process of another rank was seen to end without a word."""
        self._write(Kind.PEER_ENDED, (rank, ALL_RANKS))

    def close(self) -> None:
        """Record a clean end, and record nothing after it."""
        self._write(Kind.END, (0, ALL_RANKS))
        self._recording = False
        self._closed.set()
        if self._signs is not None and self._signs is not threading.current_thread():
            self._signs.join(CLOSE_S)
        self._note_no_crash()
        self._write_missing()
        self._close_file()

    def leave_to_parent(self) -> None:
        """Record nothing more in a forked child."""
        self._recording = False
        self._note_no_crash()
        self._close_file()

    def _note_no_crash(self) -> None:
        if self._crashes is not None and self._crashes.alive:
            faulthandler.disable()

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _write(
        self, kind: Kind, numbers: tuple[int, int], name: str = "", text: str = "", site: str = ""
    ) -> None:
        """Write an event, with a number and the awaited rank; name, text and site."""
        self.active_at = time.monotonic()
        if self._recording:
            event = next(self._numbers)
            self._put(event % CAPACITY, event, kind, numbers, (name, text, site))

    def _put(
        self,
        record: int,
        event: int,
        kind: Kind,
        numbers: tuple[int, int],
        texts: tuple[str, str, str],
    ) -> None:
        """Write a record, which lies within a page: a process ends before or after its write."""
        at, (number, awaited), (name, text, site) = record * RECORD_BYTES, numbers, texts
        RECORD.pack_into(
            self._ring,
            at,
            event,
            time.monotonic(),
            number,
            awaited,
            kind,
            name.encode("utf-8", "replace"),
            text.encode("utf-8", "replace"),  # is cut at its end, as the name
            site.encode("utf-8", "replace")[-SITE:],
        )
        if self._complete:
            place = self._address + at, RECORD_BYTES, HEADER_BYTES + at
            self._complete = _pwrite(self._file, *place) == RECORD_BYTES

    def _write_missing(self) -> None:
        """Write the ring to the file again if that lacks a record."""
        if not self._complete:
            try:
                for _ in range(2):  # then what has come meanwhile
                    self._complete = os.pwrite(self._file, self._ring, HEADER_BYTES) == RING_BYTES
            except OSError:
                self._complete = False

    def _give_signs(self) -> None:
        """Write the line at which the training thread is, once in a while."""
        while not self._closed.wait(SIGN_S):
            site = self._site_of_training()
            number = next(self._sign_numbers)
            record = CAPACITY + number % SIGNS
            self._put(record, number, Kind.SIGN_OF_LIFE, (0, ALL_RANKS), ("", "", site))
            self._write_missing()

    def _site_of_training(self) -> str:
        """Return the line at which the training thread is; "" if its stack is unknown."""
        return _site_or_first((file, line) for file, line, _ in stack_of(self._thread))


def site_of(stack: Iterable[tuple[str, int | None]]) -> str:
    """Return "file:line" of the user's innermost frame; "" if there is none.

    `stack` has the file and the line of each frame, the innermost first. Frames of libraries count
    where no other is the user's.
    """
    of_library = ""
    for file, line in stack:
        if not file.startswith(INTERNAL):
            if not file.startswith(LIBRARIES):
                return f"{file}:{line}"
            of_library = of_library or f"{file}:{line}"
    return of_library


def _site_or_first(stack: Iterable[tuple[str, int | None]]) -> str:
    """Return what `site_of` does, or the innermost line where no frame is the user's."""
    frames = list(stack)
    return site_of(frames) or "".join(f"{file}:{line}" for file, line in frames[:1])


def call_site() -> str:
    """Return the line of the user that the calling thread runs, as `site_of`."""
    stack = traceback.walk_stack(sys._getframe(1))
    return site_of((frame.f_code.co_filename, line) for frame, line in stack)


def boot_id() -> str:
    """Return an identifier of this host's boot, "" if there is none."""
    return _text("/proc/sys/kernel/random/boot_id").strip()


def pid_namespace() -> str:
    """Return an identifier of the namespace of this process's number, "" if there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; "" for one that is gone."""
    return read_process(pid)[1]


def read_process(pid: int) -> tuple[str, str]:
    """Return the letter of a process's state, and its start; "" both for one that is gone."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()  # a name is any bytes
    return (fields[0], fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else ("", "")


def own_oom_kills() -> tuple[str, int]:
    """Return the file that counts out-of-memory kills of this cgroup, and its count.

    The file is "" where there is none.
    """
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("memory", ""):  # of version 1, and of version 2
            name = "memory.oom_control" if controllers else "memory.events"
            file = Path("/sys/fs/cgroup", controllers, path.lstrip("/"), name)
            kills = read_oom_kills(file)
            if len(str(file)) < _MAX_PATH and kills is not None:
                return str(file), kills
    return "", 0


def read_oom_kills(file: Path) -> int | None:
    """Return the count of out-of-memory kills in a cgroup's file, None if it has none."""
    found = re.search(r"^oom_kill (\d+)$", _text(file), re.MULTILINE)
    return int(found[1]) if found else None


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
