"""Checks of the file system of a run directory."""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mntrain.checks.finding import Finding, passed

_SLOW_SYNC_S = 0.5
_SEEN_S = 5.0  # in which a file must be visible on all hosts: network file systems cache folders
_NAME = ".mntrain-doctor-"


def existing_folder(path: Path) -> Path:
    """Return the path, or its nearest parent that exists and may be looked at."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if os.path.isdir(folder))


def write_and_look(
    gather: Callable[[Any], list[Any]], rank: int, folder: Path
) -> tuple[float, list[int]]:
    """Write a small file in rank 0's folder, which exists, and look for it on all ranks.

    Collective, by `gather`, which returns the objects of all ranks; the file is removed. Returns
    the seconds that writing took, and the ranks that do not see the file within some seconds.
    Raises the OSError of rank 0 on all ranks if it cannot be written.
    """
    own, error, start = folder / f"{_NAME}{secrets.token_hex(8)}", None, time.perf_counter()
    try:
        if rank == 0:
            try:
                with own.open("x") as file:
                    file.write("mntrain")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as raised:
                error = raised
        path, error, seconds = gather((own, error, time.perf_counter() - start))[0]
        if error is not None:
            raise error
        seen = gather(is_visible(path))
    finally:
        if rank == 0:
            with suppress(OSError):
                own.unlink()
    return seconds, [other for other, sees in enumerate(seen) if not sees]


def is_visible(path: Path) -> bool:
    """Return whether this host sees a new file within a few seconds. Local."""
    deadline = time.monotonic() + _SEEN_S
    while True:
        with suppress(OSError):
            if path.name in os.listdir(path.parent):  # lets network file systems look again
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def examine(
    gather: Callable[[Any], list[Any]], rank: int, folder: Path, hosts: Sequence[str]
) -> dict[str, Finding]:
    """Check that rank 0 can write in its folder, and all hosts see it; `hosts` is by rank.

    Collective, as `write_and_look`.
    """
    fix = "give a --run.dir on a file system of the cluster that you may write to"
    try:
        seconds, blind = write_and_look(gather, rank, folder)
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror or error})"
        return {"run directory": Finding("fail", text, fix)}
    text = f"{folder}: a file is written and synced in {seconds * 1e3:.1f} ms"
    written, count = passed(text), len(set(hosts))
    if seconds > _SLOW_SYNC_S:
        written = Finding("warn", f"{text}, so checkpoints take long", fix)
    shared = passed(f"{folder} is the same on {count} host{'s' * (count > 1)}")
    if blind:
        names = list(dict.fromkeys(hosts[other] for other in blind))
        shared = Finding(
            "fail",
            f"{', '.join(names)} do{'es' * (len(names) == 1)} not see the files that rank 0 writes "
            f"in {folder}: checkpoints would be incomplete",
            "give a --run.dir on a file system that all hosts share",
        )
    return {"run directory": written, "shared files": shared}
