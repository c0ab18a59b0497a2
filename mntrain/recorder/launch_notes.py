"""Notes of rank 0 to `mntrain launch`, in the folder that its environment names.

FOLDER/run           number of the start that has recorded last, its run directory, and how it
                     was found
FOLDER/local         path of what the run has on each node, with --checkpoint.local
FOLDER/step          number of steps of any torch optimizer in this start
FOLDER/start         written by `launch` itself: the number of the start
FOLDER/hosts         written by `launch` itself: the hostfile of a start
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mntrain.recorder.recording import recordings

VARIABLE = "MNTRAIN_LAUNCH"
_APART_S = 1.0  # between two notes of steps


class FoundRun(NamedTuple):
    """A run directory, and the times at which files in it were changed before this start used it.

    In nanoseconds; 0 for what was not there.
    """

    path: Path
    summary_ns: int
    recordings_ns: int


class LaunchNotes:
    """The notes in a folder. Rank 0 writes them; `launch` reads and removes them.

    Writing never raises: a job outlives a folder that is gone.
    """

    def __init__(self, folder: Path) -> None:
        self._run, self._step, self._local = folder / "run", folder / "step", folder / "local"
        self._start = folder / "start"
        self._count, self._next_at = 0, 0.0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "LaunchNotes | None":
        """Return the notes of the launch that has started this process, if one has."""
        folder = environment.get(VARIABLE)
        return cls(Path(folder)) if folder else None

    def use_run(self, run_dir: Path) -> None:
        """Note the run directory in which this start is about to record, and its present state."""
        path = run_dir.resolve()
        times = changed_ns(path / "summary.json"), changed_ns(recordings(path))
        with suppress(OSError):
            self._run.write_text(json.dumps([self.start, str(path), *times]) + "\n")

    def use_local(self, folder: Path) -> None:
        """Note the folder of the run's checkpoints on each node."""
        with suppress(OSError):
            self._local.write_text(str(folder.absolute()))

    def keep_local(self) -> None:
        """Let the run's checkpoints on the nodes stay, from which the next start goes on."""
        with suppress(OSError):
            self._local.unlink(missing_ok=True)

    def take_step(self) -> None:
        """Count a step; note the first, and later ones once a second."""
        self._count += 1
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + _APART_S
            with suppress(OSError):
                self._step.write_text(f"{self._count}\n")

    @property
    def run(self) -> FoundRun | None:
        """The run directory of this start; None without one, or while it is being written."""
        start, path, *times = self._noted_run()
        return FoundRun(Path(path), *times) if times and start == self.start else None

    def has_begun(self, run_dir: Path) -> bool:
        """Return whether a start has recorded in a run directory, the last that recorded at all."""
        path: str = self._noted_run()[1]
        return path == str(run_dir.resolve())

    def _noted_run(self) -> list[Any]:
        text = _text(self._run)
        return json.loads(text) if text.endswith("\n") else [0, ""]

    @property
    def local(self) -> Path | None:
        """The folder of the run's checkpoints on each node, if the job has told of one."""
        text = _text(self._local)
        return Path(text) if text else None

    @property
    def steps(self) -> int | None:
        """The number of steps so far; None without any, or while it is being written."""
        text = _text(self._step)
        return int(text) if text.endswith("\n") else None

    @property
    def start(self) -> int:
        """The number of the start, from 1 on; 0 if the folder is not seen here."""
        text = _text(self._start)
        return int(text) if text.isdigit() else 0

    def begin_start(self, number: int) -> None:
        """Note the number of a start, and forget the steps of the one before."""
        self._start.write_text(str(number))
        self._step.unlink(missing_ok=True)


def changed_ns(path: Path) -> int:
    """Return when a file or folder was last changed, in nanoseconds; 0 if it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        os.listdir(path.parent)  # or NFS may know for a minute that there is no such file
        return path.read_text()
    except OSError:
        return ""
