"""Checks of the file system of a run directory. Local; the ranks that call them differ."""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from mntrain.checks.finding import Finding, passed

_SLOW_SYNC_S = 0.5
_SEEN_S = 5.0  # in which a file must be visible on all hosts: network file systems cache folders
_NAME = ".mntrain-doctor-"


class Probe:
    """A small file in an existing folder, made by one rank and read by others. `close` removes it.

    Raises OSError if it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{_NAME}{secrets.token_hex(8)}"
        self.token = secrets.token_hex(16)
        start = time.perf_counter()
        try:
            with self.path.open("x") as file:
                file.write(self.token)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self.close()
            raise
        self.sync_s = time.perf_counter() - start

    def close(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self.path.unlink()


def existing_folder(path: Path) -> Path:
    """Return the path, or its nearest parent that exists and may be looked at."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if os.path.isdir(folder))


def writing(folder: Path, probe: Probe | None, error: str) -> Finding:
    """Judge what the rank that made the probe has seen; `error` if it could not be made."""
    fix = "give a --run.dir on a file system of the cluster that you may write to"
    if probe is None:
        return Finding("fail", f"{folder} cannot be written ({error})", fix)
    text = f"{folder}: a file is written and synced in {probe.sync_s * 1e3:.1f} ms"
    if probe.sync_s > _SLOW_SYNC_S:
        return Finding("warn", f"{text}, so checkpoints take long", fix)
    return passed(text)


def is_visible(path: Path, token: str) -> bool:
    """Return whether this host sees the file with this text, within a few seconds."""
    deadline = time.monotonic() + _SEEN_S
    while True:
        with suppress(OSError):
            os.listdir(path.parent)  # lets network file systems look again
            if path.read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def sharing(folder: Path, blind_hosts: list[str], hosts: int) -> Finding:
    """Judge which hosts do not see a file that rank 0's host has written."""
    if blind_hosts:
        return Finding(
            "fail",
            f"{', '.join(blind_hosts)} do{'es' * (len(blind_hosts) == 1)} not see the files that "
            f"rank 0 writes in {folder}: checkpoints would be incomplete",
            "give a --run.dir on a file system that all hosts share",
        )
    return passed(f"{folder} is the same on {hosts} host{'s' * (hosts > 1)}")
