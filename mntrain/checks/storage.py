"""Checks of the file system of a run directory."""

import os
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from mntrain.checks.finding import Finding, passed

T = TypeVar("T")

# Hosts write parts of one file that meet at multiples of it alone: clients of network file systems
# may write whole pages back.
PAGE_BYTES = 64 << 10
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
        seen = gather(is_visible(path, _SEEN_S))
    finally:
        if rank == 0:
            with suppress(OSError):
                own.unlink()
    return seconds, [other for other, sees in enumerate(seen) if not sees]


def write_together(
    gather: Callable[[Any], list[Any]], rank: int, folder: Path, hosts: Sequence[str]
) -> tuple[str, str] | None:
    """Write one file from all ranks, as they write a checkpoint, and read it on other hosts.

    Collective, by `gather`. `hosts` is by rank, and several. The file, in rank 0's folder, is
    removed. Returns a host that wrote and one that reads other bytes, if there are such. Raises the
    OSError of a rank on all ranks.
    """
    size, own = len(hosts), secrets.token_bytes(PAGE_BYTES)
    path = gather(folder / f"{_NAME}{secrets.token_hex(8)}")[0]
    written = gather(zlib.crc32(own))
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

    def together(act: Callable[[], T]) -> T:
        done: list[T] = []
        error: OSError | None = None
        try:
            done.append(act())
        except OSError as raised:
            error = raised
        if (first := next(filter(None, gather(error)), None)) is not None:
            raise first
        return done[0]

    def opened() -> int:
        file = os.open(path, flags, 0o600)
        opens.callback(os.close, file)
        return file

    def write() -> None:
        os.ftruncate(file, size * PAGE_BYTES)
        os.pwrite(file, own, rank * PAGE_BYTES)

    def read() -> tuple[str, str] | None:
        for writer in range(size):
            others = [(writer + step) % size for step in range(1, size)]
            if next(other for other in others if hosts[other] != hosts[writer]) == rank:
                with path.open("rb") as file:
                    file.seek(writer * PAGE_BYTES)
                    if zlib.crc32(file.read(PAGE_BYTES)) != written[writer]:
                        return hosts[writer], hosts[rank]
        return None

    try:
        with ExitStack() as opens:
            file = together(opened)
            together(write)  # before the first bytes travel: what others wrote is not known then
            together(lambda: os.fsync(file))
        found: tuple[str, str] | None = next(filter(None, gather(together(read))), None)
        return found
    finally:
        if rank == 0:
            with suppress(OSError):
                path.unlink()


def is_visible(path: Path, within_s: float) -> bool:
    """Return whether this host sees a new file within some seconds. Local."""
    deadline = time.monotonic() + within_s
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
    """Check that rank 0 can write in its folder, and all hosts see it and can write one file.

    `hosts` is by rank. Collective, as `write_and_look`.
    """
    fix = "give a --run.dir on a file system of the cluster that you may write to"
    try:
        seconds, blind = write_and_look(gather, rank, folder)
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror or error})"
        return {"run directory": Finding("fail", text, fix)}
    text = f"{folder}: a file is written and synced in {seconds * 1e3:.1f} ms"
    written = passed(text)
    if seconds > _SLOW_SYNC_S:
        written = Finding("warn", f"{text}, so checkpoints take long", fix)
    return {"run directory": written, "shared files": _shared(gather, rank, folder, hosts, blind)}


def _shared(
    gather: Callable[[Any], list[Any]],
    rank: int,
    folder: Path,
    hosts: Sequence[str],
    blind: Sequence[int],
) -> Finding:
    """Return whether all hosts see one folder, and keep what they write into one file there."""
    count, fix = len(set(hosts)), "give a --run.dir on a file system that all hosts share"
    if blind:
        names = list(dict.fromkeys(hosts[other] for other in blind))
        return Finding(
            "fail",
            f"{', '.join(names)} do{'es' * (len(names) == 1)} not see the files that rank 0 writes "
            f"in {folder}: checkpoints would be incomplete",
            fix,
        )
    if count == 1:
        return passed(f"{folder} is the same on 1 host")
    try:
        wrong = write_together(gather, rank, folder, hosts)
    except OSError as error:
        text = f"{folder}: not all hosts can write one file ({error.strerror or error})"
        return Finding("fail", text, fix)
    if wrong:
        return Finding(
            "fail",
            f"{folder}: what {wrong[0]} writes into a file while others write other parts of it, "
            f"{wrong[1]} reads otherwise: checkpoints would be damaged",
            "give a --run.dir on a file system that keeps what several hosts write into one file",
        )
    return passed(f"{folder} is the same on {count} hosts, which can write one file together")
