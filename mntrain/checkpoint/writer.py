"""File operations of a rank during a save, in a thread of their own. No MPI.

RUN/checkpoints/.step-00000050.<token>/     while it is written
RUN/checkpoints/step-00000050/              after every rank's part is on the disk

The master creates the folder under a third name, with all files at full length, and renames it:
a rank that sees the folder can write at once.
"""

import math
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mntrain.checkpoint.format import (
    FILE,
    ChecksummedRange,
    FileLayout,
    Manifest,
    sync_folder,
)
from mntrain.checkpoint.reader import best_of, list_checkpoints, scores
from mntrain.checkpoint.shards import TensorRange
from mntrain.comm.pending import Future as CommFuture

Checksums = dict[str, list[ChecksummedRange]]  # of what was written, by file

_POLL_S = 0.01
_LOOK_S = 1.0  # between two looks into the folders above, which ask the server
_VISIBLE_WITHIN_S = 60.0  # for a new folder on a shared file system


@dataclass(eq=False)
class PendingSave:
    """A save in progress. The futures are of this rank's writing thread."""

    target: Path
    manifest: Manifest  # completed as the save proceeds
    start: float
    of_master: bool = False
    folder: Path | None = None  # the temporary one
    layouts: Mapping[str, FileLayout] = field(default_factory=dict)
    created: threading.Event = field(default_factory=threading.Event)  # the folder, by the master
    abandoned: threading.Event = field(default_factory=threading.Event)  # will not be created
    prepared: Future[None] = field(default_factory=Future)
    written: Future[Checksums] = field(default_factory=Future)
    exchanged: CommFuture[Any] | None = None  # by all ranks: outlines, then what was written
    published: Future[None] | None = None  # on other ranks than the master: all ranks have written

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(layout.nbytes for layout in self.layouts.values())

    def wait_for_all(self) -> None:
        """Wait for the other ranks as in a collective: this is what the watchdog can see."""
        if self.exchanged is not None:
            self.exchanged.wait()


def make_folder(save: PendingSave, folder: Path) -> None:
    """Create the folder and its files, on the master. Raises OSError, also if the disk is full."""
    hidden = folder.with_name(f"{folder.name}.new")
    try:
        hidden.mkdir(parents=True)
        for name, layout in save.layouts.items():
            with (hidden / name).open("xb") as file:
                if hasattr(os, "posix_fallocate"):  # reserves the space
                    os.posix_fallocate(file.fileno(), 0, layout.nbytes)
                else:
                    file.truncate(layout.nbytes)
        hidden.rename(folder)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise OSError(
            f"{error.strerror}: it needs {save.nbytes / 1e6:.1f} MB in {folder.parent}"
        ) from error


def write(save: PendingSave, ranges: Iterable[TensorRange], *, headers: bool) -> Checksums:
    """Write ranges, and the files' headers if requested, once the folder exists.

    Returns the written ranges by file, after they are on the disk. Raises OSError.
    """
    folder = _wait_for_folder(save)
    files: dict[str, int] = {}
    written: Checksums = {name: [] for name in save.layouts}
    with ExitStack() as stack:
        for name, layout in save.layouts.items():
            file = stack.enter_context((folder / name).open("r+b", buffering=0))
            files[name] = file.fileno()
            if headers:
                written[name] += layout.write_header(files[name])
        for name, tensor, flat, low in ranges:
            written[name] += save.layouts[name].write(files[name], tensor, flat.cpu(), low)
        for number in files.values():
            os.fsync(number)
    return written


def publish(folder: Path, target: Path, content: Manifest) -> None:
    """Write the manifest, then rename the folder to `target`, which makes it a checkpoint.

    All other files must be on the disk. Raises OSError, and ValueError as `Manifest.to_json`.
    """
    with (folder / FILE).open("w", encoding="utf-8") as text:
        text.write(content.to_json())
        text.flush()
        os.fsync(text.fileno())
    sync_folder(folder)
    if target.exists():  # damaged, or the job would have resumed from it
        target.rename(target.with_name(f".{target.name}.old"))
    folder.rename(target)
    sync_folder(target.parent)


def remove_old(run_dir: Path, keep: int, metric: str) -> None:
    """Remove all but the newest `keep` checkpoints and the first with the lowest score by a metric.

    A folder that cannot be removed is left to the next call. Files of others stay.
    """
    for leftover in (run_dir / "checkpoints").glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    paths = list_checkpoints(run_dir)
    best = best_of(scores(paths, metric))
    for path in paths[keep:]:
        if path != best:
            # Renamed first: a half-removed folder must not look like a checkpoint.
            removed = path.with_name(f".{path.name}.old")
            with suppress(OSError):
                path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def _wait_for_folder(save: PendingSave) -> Path:
    """Wait until the folder is visible. Raises FileNotFoundError if only the master sees it."""
    deadline, looked_at = None, -math.inf
    while not save.abandoned.is_set():
        if (folder := save.folder) is not None:
            if (now := time.monotonic()) > looked_at + _LOOK_S:
                looked_at = now
                for above in (folder.parent.parent, folder.parent):
                    with suppress(OSError):
                        os.listdir(above)  # else NFS says for 30 s that there is no such folder
            if folder.is_dir():
                return folder
        if save.created.is_set():
            deadline = deadline or time.monotonic() + _VISIBLE_WITHIN_S
            if time.monotonic() > deadline:
                raise FileNotFoundError(
                    f"{save.target.parent} is not what rank 0 sees: is it on a file system that "
                    "all nodes share?"
                )
        save.abandoned.wait(_POLL_S)
    raise FileNotFoundError("the save was abandoned")
