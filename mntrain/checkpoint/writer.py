"""What one rank does on the disk for a checkpoint, in a thread of its own: no MPI here.

RUN/checkpoints/.step-00000050.<token>/     while it is written
RUN/checkpoints/step-00000050/              when every rank's part is safe on the disk

The master makes the folder under yet another name, with all files at their full length, and renames
it, so that who sees it can write at once.
"""

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mntrain.checkpoint import manifest
from mntrain.checkpoint.discovery import losses_of, steps_in
from mntrain.checkpoint.format import ChecksummedRange, FileLayout, RangeWriter, create
from mntrain.checkpoint.manifest import Manifest
from mntrain.checkpoint.snapshot import ByteRange

_LOOK_S = 0.01
_SEEN_S = 60.0  # in which a folder that is there has to be seen by all nodes


@dataclass
class CheckpointFolder:
    """Where a checkpoint is written, and what is known of it so far."""

    partial: Path = Path()
    layouts: Mapping[str, FileLayout] = field(default_factory=dict)
    made: threading.Event = field(default_factory=threading.Event)  # the master says so
    given_up: threading.Event = field(default_factory=threading.Event)  # it never will be

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(layout.nbytes for layout in self.layouts.values())


def make(place: CheckpointFolder) -> None:
    """Make the folder and its files. OSError; where there is no room, with how much is needed."""
    unseen = place.partial.with_name(f"{place.partial.name}.new")
    try:
        unseen.mkdir(parents=True)
        for name, layout in place.layouts.items():
            create(unseen / name, layout.nbytes)
        unseen.rename(place.partial)
    except OSError as error:
        shutil.rmtree(unseen, ignore_errors=True)
        raise OSError(_without_room(place, error)) from error


def write(
    place: CheckpointFolder, ranges: Iterable[ByteRange], *, header: bool
) -> dict[str, list[ChecksummedRange]]:
    """Write these ranges, and the files' headers if asked to, when the folder is there.

    Returns when they are on the disk; gives what was written, by file. OSError.
    """
    _await(place)
    with ExitStack() as files:
        writers = {
            name: files.enter_context(RangeWriter(place.partial / name, layout))
            for name, layout in place.layouts.items()
        }
        for writer in writers.values() if header else ():
            writer.header()
        for one in ranges:
            writers[one.file].write(one.name, one.flat.cpu(), one.low)
        for writer in writers.values():
            writer.sync()
        return {name: writer.runs for name, writer in writers.items()}


def publish(place: CheckpointFolder, target: Path, written: Manifest) -> None:
    """Make a checkpoint of a folder whose other files are safe: the manifest, then one rename.

    OSError, and ValueError for what a manifest cannot say.
    """
    file = os.open(place.partial / manifest.FILE, os.O_WRONLY | os.O_CREAT, 0o666)
    with os.fdopen(file, "w", encoding="utf-8") as text:
        text.write(written.to_json())
        text.flush()
        os.fsync(text.fileno())
    _sync_folder(place.partial)
    if target.exists():  # a damaged one: a sound one would have been resumed from
        target.rename(target.with_name(f".{target.name}.old"))
    place.partial.rename(target)
    _sync_folder(target.parent)


def remove_old(folder: Path, keep: int) -> None:
    """Keep the newest few checkpoints, and that of the lowest evaluation loss.

    What cannot be removed today is removed next time.
    """
    with suppress(OSError):
        for other in folder.glob(".*"):
            shutil.rmtree(other)
        for path in _superfluous(steps_in(folder), keep):
            # Renamed first: what is half removed is no checkpoint.
            gone = path.with_name(f".{path.name}.old")
            path.rename(gone)
            shutil.rmtree(gone)


def discard(place: CheckpointFolder) -> None:
    """Remove what was written so far."""
    if place.partial.name:
        shutil.rmtree(place.partial, ignore_errors=True)


def _await(place: CheckpointFolder) -> None:
    """Wait until the folder is there. FileNotFoundError when the master has it, and it is not."""
    until = None
    while True:
        if place.given_up.is_set():
            raise FileNotFoundError("it was given up")
        if place.partial.is_dir():
            return
        if place.made.is_set():
            until = until or time.monotonic() + _SEEN_S
            if time.monotonic() > until:
                raise FileNotFoundError(
                    f"{place.partial.parent} is not what rank 0 sees: is it on a file system that "
                    "all nodes share?"
                )
        place.given_up.wait(_LOOK_S)


def _without_room(place: CheckpointFolder, error: OSError) -> str:
    folder = place.partial.parent
    if error.errno != errno.ENOSPC or not folder.exists():
        return f"{folder}: {error.strerror}"
    free = shutil.disk_usage(folder).free
    return (
        f"{error.strerror}: it needs {place.nbytes / 1e6:.1f} MB, of which {free / 1e6:.1f} MB "
        f"are free in {folder} now"
    )


def _superfluous(newest_first: list[Path], keep: int) -> list[Path]:
    losses = losses_of(newest_first)
    best = min(losses, key=lambda path: losses[path], default=None)
    return [path for path in newest_first[keep:] if path != best]


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
