"""The lock of a run's directory, which also works where the file system has no file locks.

RUN/.lock           the holder, as a JSON object, and a file lock (flock) where there are such
RUN/.lock.claim     made and removed by a process that is about to become the holder

A file lock ends with its process, but some file systems refuse it, and others keep it to each host.
So a job also reads who the holder is. On the same host, a holder is alive if its process is. On
another one, it is alive if it counts on: it writes a higher number every BEAT_S. After SILENT_S
without, another job takes the lock; a holder that was stopped so long then finds another name in
the file, and ends.
"""

import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from mntrain.comm.forked import call_in_child
from mntrain.recorder.events import boot_id, pid_namespace, process_start

FILE = ".lock"
BEAT_S = 5.0  # between two numbers of the holder
SILENT_S = 30.0  # without a new number, until a holder on another host counts as dead
CLAIM_S = 60.0  # for a process to become the holder, which takes SILENT_S at most
CLOSE_S = 2.0  # for the holder's last write, of which a hung file system keeps no exit back
_POLL_S = 0.2
_WIDTH = 1000  # of the text in bytes, so that a longer one leaves nothing behind
_READS = 5  # of a text that is being written


@dataclass(frozen=True)
class Holder:
    """A process that holds the lock, or asks for it."""

    holder: str  # in words
    token: str  # of this lock alone
    host: str
    pid: int
    start: str  # of the process, in clock ticks since boot
    boot: str
    pid_namespace: str
    count: int = 0  # rises while the process holds the lock

    def alive_here(self) -> bool | None:
        """Return whether the process runs, None if that cannot be seen from this one."""
        here = socket.gethostname(), boot_id(), pid_namespace()
        if here != (self.host, self.boot, self.pid_namespace) or not (self.boot and self.start):
            return None
        return process_start(self.pid) == self.start


class _HeldError(Exception):
    """Raised where another process has the lock. The message is the holder in words."""


class RunLock:
    """The lock of a run's directory, held until `close` or the end of the process.

    `on_lost` is called by a thread, with a sentence, when another job has taken the lock. Raises
    ValueError if another process holds the lock, and OSError if no files can be made. Takes up to
    SILENT_S if a process on another host has left the lock. Local.
    """

    def __init__(self, run_dir: Path, on_lost: Callable[[str], None]) -> None:
        path, own = run_dir / FILE, _own_name()
        self._file = file = path.open("ab")
        try:
            _lock_file(file, path)
            with _claimed(path, own):
                _expect_no_other(path)
                _write(path, own)
        except BaseException as error:
            file.close()
            if not isinstance(error, _HeldError):
                raise
            raise ValueError(
                f"{run_dir} is in use by a job ({error}): wait for its end, or give another run "
                "directory"
            ) from None
        call_in_child(self._leave_to_parent)
        closed, writing = threading.Event(), threading.Lock()
        self._release = weakref.finalize(self, _release, file, path, own, closed, writing)
        arguments = path, own, closed, writing, on_lost
        threading.Thread(
            target=_count_on, args=arguments, name="mntrain run lock", daemon=True
        ).start()

    def close(self) -> None:
        """Let other jobs use the directory."""
        self._release()

    def _leave_to_parent(self) -> None:
        """Close a forked child's copy of the file, whose file lock would outlive the parent."""
        self._file.close()


def _own_name() -> Holder:
    pid, host, now = os.getpid(), socket.gethostname(), datetime.now(UTC)
    words = f"on {host}, process {pid}, since {now:%Y-%m-%d %H:%M:%S} UTC"
    start = process_start(pid)
    return Holder(words, secrets.token_hex(8), host, pid, start, boot_id(), pid_namespace())


def _lock_file(file: BinaryIO, path: Path) -> None:
    """Take the file lock, without effect on file systems without such."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        found = _read(path)
        words = found.holder if found else path.read_text(errors="replace")[:_WIDTH].strip()
        raise _HeldError(words or "unknown") from None
    except OSError:
        pass


@contextmanager
def _claimed(path: Path, own: Holder) -> Iterator[None]:
    """Keep all others from becoming the holder: only one process can make a file."""
    claim, seen, since = path.with_name(f"{path.name}.claim"), "", time.monotonic()
    while True:
        with suppress(FileExistsError), claim.open("xb", buffering=0) as file:
            try:
                file.write(_to_bytes(own))
            except OSError:  # the disk is full: without a name, it would keep others out
                claim.unlink(missing_ok=True)
                raise
            break
        other = _read(claim)
        if (token := other.token if other else "") != seen:
            seen, since = token, time.monotonic()
        alive, late = other and other.alive_here(), time.monotonic() - since > CLAIM_S
        if late and alive:
            raise _HeldError(other.holder if other else "unknown")
        if late or alive is False:
            claim.unlink(missing_ok=True)
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        if (left := _read(claim)) and left.token == own.token:
            claim.unlink(missing_ok=True)


def _expect_no_other(path: Path) -> None:
    """Raise _HeldError if the file names a process that is alive."""
    if (found := _read(path)) is None:
        return
    alive = found.alive_here()
    if alive is None:
        print(
            f"mntrain: {path} names a job {found.holder}: waiting up to {SILENT_S:g} s for a sign "
            "that it runs",
            file=sys.stderr,
            flush=True,
        )
        alive = _counts_on(path, found)
    if alive:
        raise _HeldError(found.holder)


def _counts_on(path: Path, found: Holder) -> bool:
    """Return whether a holder writes a new number within SILENT_S."""
    for _ in range(round(SILENT_S / _POLL_S)):  # by looks: a file system may hang in one of them
        time.sleep(_POLL_S)
        if (now := _read(path)) != found:
            return now is not None  # else released
    return False


def _count_on(
    path: Path,
    own: Holder,
    closed: threading.Event,
    writing: threading.Lock,
    on_lost: Callable[[str], None],
) -> None:
    """Write a higher number again and again, until the lock is closed or lost."""
    count = 0
    while not closed.wait(BEAT_S):
        count += 1
        with suppress(OSError):  # that of a moment, or the directory is gone
            with writing:
                if closed.is_set():
                    return
                found = _read(path)
                other = None if found is None or found.token == own.token else found
                if other is None:
                    _write(path, replace(own, count=count))
            if other is not None:
                on_lost(
                    f"{path.parent} was taken by another job ({other.holder}), which had found no "
                    f"sign of this one for {SILENT_S:g} s: this job ends"
                )
                return


def _release(
    file: BinaryIO, path: Path, own: Holder, closed: threading.Event, writing: threading.Lock
) -> None:
    """Name no holder any more, and let go of the file. A forked child only closes its copy."""
    closed.set()
    with suppress(OSError):
        if os.getpid() == own.pid:
            if writing.acquire(timeout=CLOSE_S):
                with suppress(OSError):
                    if (found := _read(path)) and found.token == own.token:
                        _write(path, None)
                writing.release()
            fcntl.flock(file, fcntl.LOCK_UN)  # children that C code has forked may have it open
    file.close()


def _write(path: Path, holder: Holder | None) -> None:
    """Write the holder to the disk, in place, so that a file lock stays with the file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if holder else os.O_TRUNC)
    descriptor = os.open(path, flags, 0o666)
    try:
        if holder:
            os.pwrite(descriptor, _to_bytes(holder), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> Holder | None:
    """Return the holder that a file names, None if it names none."""
    for _ in range(_READS):
        try:
            text = path.read_text(errors="replace").strip()  # opened anew, past caches of NFS
        except FileNotFoundError:
            return None
        if not text.startswith("{"):  # empty, or of an earlier version
            return None
        with suppress(ValueError, KeyError, TypeError):
            content = json.loads(text)
            return Holder(**{item.name: content[item.name] for item in fields(Holder)})
        time.sleep(_POLL_S / 4)
    return None


def _to_bytes(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode().ljust(_WIDTH)
