"""The lock of a run's directory, which needs no file locks of the file system.

RUN/.lock names the holder, as a JSON object, and is removed at its end. Only one process can make
the file. What a killed job has left is replaced: on the same host, a holder is alive if its process
is. On another one it is alive if it counts on: it writes a higher number every BEAT_S. After
SILENT_S without, another job takes the lock; a holder that was stopped so long then finds another
name in the file, and ends. A later start of the same `mntrain launch` takes it at once: launch has
ended the holder, or had no answer from its host.
"""

import atexit
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mntrain.recorder.events import boot_id, pid_namespace, process_start
from mntrain.recorder.launch_notes import VARIABLE, LaunchNotes

FILE = ".lock"
BEAT_S = 5.0  # between two numbers of the holder
SILENT_S = 30.0  # without a new number, until a holder on another host counts as dead
EMPTY_S = 2.0  # in which a process that has made the file writes its name
SETTLE_S = 0.5  # in which of several jobs that replace a dead holder the last one is known
CLOSE_S = 2.0  # for the removal of the file, of which a hung file system keeps no exit back
_POLL_S = 0.2
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW  # not the file to which somebody has put a link here
_WIDTH = 1000  # of the text in bytes: a new number is written over the old one, also on a full disk


class RunLock:
    """The lock of a run's directory, held until `close` or the end of the process.

    `on_lost` is called by a thread, with a sentence, when another job has taken the lock, or when
    another folder is in the place of the directory. Raises ValueError if another process holds the
    lock, and OSError if no files can be made. Takes up to SILENT_S if a process on another host has
    left the lock. Local.
    """

    def __init__(self, run_dir: Path, on_lost: Callable[[str], None]) -> None:
        self._path = (run_dir / FILE).absolute()  # the working directory may change
        self._own, self._on_lost = describe_process(), on_lost
        replaces = False
        while not _make(self._path, self._own):
            found = read(self._path)
            if _is_alive(self._path, found):
                raise _in_use(run_dir, found)
            _remove(self._path, found)
            replaces = True
        if replaces:
            time.sleep(SETTLE_S)  # others may have found the same holder dead
            if not self._is_own(found := read(self._path)):
                raise _in_use(run_dir, found)
        self._folder = run_dir.stat()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="mntrain run lock", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Let other jobs use the directory. Does nothing in a forked child, which has no lock."""
        atexit.unregister(self.close)
        self._closed.set()
        self._thread.join(CLOSE_S)

    def replaced(self) -> str:
        """Return a sentence if another folder is in the place of the directory, else ""."""
        # Not by the number of the folder alone, which some file systems change.
        if os.path.samestat(self._folder, self._path.parent.stat()) or read(self._path):
            return ""
        return f"{self._path.parent} was removed or moved, and there is another folder in its place"

    def _hold(self) -> None:
        """Count on until the lock is closed or lost, and remove the file then. In the thread."""
        while not self._closed.wait(BEAT_S):
            self._own["count"] += 1
            with suppress(OSError):  # that of a moment, or the directory is gone
                found = read(self._path)
                if found and not self._is_own(found):
                    self._on_lost(
                        f"{self._path.parent} was taken by another job ({_words(found)}), which "
                        f"had found no sign of this one for {SILENT_S:g} s: this job ends"
                    )
                    return
                if not found and (problem := self.replaced()):
                    self._on_lost(f"{problem}: this job ends")
                    return
                write(self._path, self._own)
        with suppress(OSError):
            if self._is_own(read(self._path)):
                self._path.unlink()

    def _is_own(self, found: dict[str, Any]) -> bool:
        return bool(found.get("token") == self._own["token"])


def describe_process() -> dict[str, Any]:
    """Return what the file says of this process, as the holder of a new lock."""
    pid, host, now, boot = os.getpid(), socket.gethostname(), datetime.now(UTC), boot_id()
    return {
        "holder": f"on {host}, process {pid}, since {now:%Y-%m-%d %H:%M:%S} UTC",
        "token": secrets.token_hex(8),  # of this lock alone
        # In which no other process has the same number and start; "" if that is unknown.
        "place": f"{host} {boot} {pid_namespace()}" if boot else "",
        "pid": pid,
        "start": process_start(pid),  # in clock ticks since boot
        "count": 0,  # rises while the process holds the lock
        "launch": os.environ.get(VARIABLE, ""),
        "launch start": notes.start if (notes := LaunchNotes.of(os.environ)) else 0,
    }


def read(path: Path) -> dict[str, Any]:
    """Return what the file says; nothing if there is none, or if it is damaged."""
    with suppress(FileNotFoundError, ValueError):
        content = json.loads(path.read_text())  # opened anew, past caches of NFS
        return content if isinstance(content, dict) else {}
    return {}


def write(path: Path, holder: dict[str, Any], flags: int = 0) -> None:
    """Write the holder to the disk, in place. `flags` are more of those of `os.open`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _OPEN | flags, 0o666)
    try:
        os.pwrite(descriptor, json.dumps(holder).encode().ljust(_WIDTH), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make(path: Path, own: dict[str, Any]) -> bool:
    """Make the file, and return True, unless there is one."""
    try:
        write(path, own, os.O_EXCL)
    except FileExistsError:
        return False
    except OSError:  # the disk is full: without a name, the file would keep others out
        path.unlink(missing_ok=True)
        raise
    return True


def _remove(path: Path, dead: dict[str, Any]) -> None:
    """Remove the file of a dead holder, but not that of another job which has replaced it."""
    aside = path.with_name(f"{FILE}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        if read(aside) == dead:
            aside.unlink()
        else:
            aside.rename(path)


def _is_alive(path: Path, found: dict[str, Any]) -> bool:
    """Return whether the holder that the file names is alive. Takes up to SILENT_S."""
    own = describe_process()
    if found.get("place") == own["place"] != "" and found["start"]:
        return process_start(found["pid"]) == str(found["start"])
    if found.get("launch") == own["launch"] != "" and found["launch start"] < own["launch start"]:
        return False
    if found:
        print(
            f"mntrain: {path} names a job {_words(found)}: waiting up to {SILENT_S:g} s for a sign "
            "that it runs",
            file=sys.stderr,
            flush=True,
        )
    seconds = SILENT_S if found else EMPTY_S
    for _ in range(round(seconds / _POLL_S)):  # by looks: a file system may hang in one of them
        time.sleep(_POLL_S)
        if (now := read(path)) != found:
            return bool(now)  # else released
    return False


def _in_use(run_dir: Path, found: dict[str, Any]) -> ValueError:
    return ValueError(
        f"{run_dir} is in use by a job ({_words(found)}): wait for its end, or give another run "
        "directory"
    )


def _words(found: dict[str, Any]) -> str:
    return str(found.get("holder", "of an unknown process"))
