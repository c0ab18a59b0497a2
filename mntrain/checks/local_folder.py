"""Folders of checkpoints in the nodes' memory: whose they are, and which steps in them are valid.

DIR/<run>/node-0/<attempt>/step-00000050/    slices of a node's ranks, and copies of its partner's

<run> stands for a run directory and the run in it, and node-1, node-2, ... are the further virtual
nodes of a host. An attempt is what one start of the run has trained. RUN/.attempts.json has those
that the run consists of: where one went back to an earlier step, what those before it had trained
after this step is no part of the run any more.

What a run has left in DIR on this host is removed by:

    python -m mntrain.checks.local_folder DIR RUN
"""

import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE, S_ISDIR
from typing import Any

from mntrain.checks.finding import Finding, passed

ATTEMPTS_FILE = ".attempts.json"
NODE = "node-"  # the beginning of the name of a node's folder


@dataclass(frozen=True)
class Attempts:
    """The attempts of a run that have steps which still belong to it, the first one first."""

    run: str  # of this run alone, also if another one is in the same directory later
    starts: tuple[tuple[str, int], ...] = ()  # the name of each, and the steps taken before it

    def valid(self, attempt: str, step: int) -> bool:
        """Return whether the state that an attempt reached after a step is of this run."""
        numbers = [number for number, (name, _) in enumerate(self.starts) if name == attempt]
        return bool(numbers) and all(
            start < step if number == numbers[0] else step <= start
            for number, (_, start) in enumerate(self.starts)
            if number >= numbers[0]
        )

    def begun(self, step: int) -> "Attempts":
        """Return the attempts with a new one, which begins with the state after a step."""
        kept = tuple((name, start) for name, start in self.starts if start < step)
        return Attempts(self.run, (*kept, (secrets.token_hex(4), step)))

    @property
    def last(self) -> str:
        """The attempt that began last."""
        return self.starts[-1][0]

    def text(self) -> str:
        """Return the content of the file."""
        return json.dumps({"run": self.run, "attempts": self.starts}) + "\n"


def new_attempts() -> Attempts:
    """Return those of a run that has none yet."""
    return Attempts(secrets.token_hex(8))


def read_attempts(run_dir: Path) -> Attempts | None:
    """Return the attempts of a run; None if it has no file of them, or a damaged one.

    Raises OSError if the file cannot be read.
    """
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        content = json.loads((run_dir / ATTEMPTS_FILE).read_text())
        starts = tuple((str(name), int(start)) for name, start in content["attempts"])
        return Attempts(str(content["run"]), starts)
    return None


def run_folder(run_dir: Path, attempts: Attempts) -> str:
    """Return the name of the folder of a run within DIR."""
    of_run = f"{os.path.realpath(run_dir)}\0{attempts.run}"
    return hashlib.sha256(of_run.encode()).hexdigest()[:16]


def prepare(folder: Path) -> None:
    """Make DIR on this host unless it is there. Local.

    Raises ValueError if it cannot be made or written, or is not this user's alone.
    """
    name, fix = f"the folder for local checkpoints, {folder},", "give another one"
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ValueError(
            f"{name} cannot be made ({error.strerror}): give a new name in a folder that is there "
            "on every node and can be written to, such as /dev/shm"
        ) from error
    about = folder.lstat()
    if not S_ISDIR(about.st_mode):
        raise ValueError(f"{name} is no folder: {fix}")
    if about.st_uid != os.geteuid():
        raise ValueError(
            f"{name} belongs to the user {about.st_uid}: {fix}, such as {folder}/NAME if it is for "
            "all"
        )
    if about.st_mode & 0o077:
        mode = f"{S_IMODE(about.st_mode):o}"
        raise ValueError(
            f"{name} is open to other users (mode {mode}): {fix}, such as {folder}/NAME"
        )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{name} cannot be written: {fix}")


def free_bytes(folder: Path) -> int:
    """Return the bytes that a user may still write in a folder. Raises OSError."""
    about = os.statvfs(folder)
    return about.f_bavail * about.f_frsize


def examine(
    gather: Callable[[Any], list[Any]], rank: int, folder: Path, hosts: Sequence[str]
) -> Finding:
    """Check that DIR can be used on all hosts, and has about as much room on each. Collective.

    `hosts` is by rank. A folder that was not there is removed again.
    """
    first, problem, room, made = hosts.index(hosts[rank]) == rank, "", 0, False
    if first:
        made = not os.path.lexists(folder)
        try:
            prepare(folder)
            room = free_bytes(folder)
        except (OSError, ValueError) as error:
            problem = str(error)
    gathered: list[tuple[str, int, bool]] = gather((problem, room, first))
    if first and made:
        with suppress(OSError):
            folder.rmdir()
    found = {hosts[r]: one[:2] for r, one in enumerate(gathered) if one[2]}
    if wrong := {host: text for host, (text, _) in found.items() if text}:
        text = next(iter(wrong.values()))
        return Finding("fail", f"{', '.join(wrong)}: {text}", "")
    rooms = {host: nbytes for host, (_, nbytes) in found.items()}
    least = min(rooms, key=rooms.__getitem__)
    text = f"{folder} has room for {rooms[least] / 1e9:.3g} GB or more on each host"
    if rooms[least] < max(rooms.values()) / 2:
        most = max(rooms.values()) / 1e9
        return Finding(
            "warn",
            f"{folder} has room for {rooms[least] / 1e9:.3g} GB on {least}, and for {most:.3g} GB "
            "on another host",
            "remove what is left there of other jobs, or make it as large everywhere; `plan` says "
            "what a job needs",
        )
    return passed(text)


def clear(folder: Path, run_dir: Path) -> None:
    """Remove what a run has left in DIR on this host, if anything. Local.

    Raises OSError if the run directory cannot be read, and ValueError if it is not that of a run
    with such checkpoints.
    """
    attempts = read_attempts(run_dir)
    if attempts is None:
        raise ValueError(
            f"{run_dir} has no {ATTEMPTS_FILE}, or a damaged one: give the directory of a run with "
            "--checkpoint.local, or, if it was removed, remove DIR"
        )
    shutil.rmtree(folder / run_folder(run_dir, attempts), ignore_errors=True)


def main(words: Sequence[str]) -> int:
    """Clear by the words of a command line; return the exit code."""
    if len(words) != 2:
        print("usage: python -m mntrain.checks.local_folder DIR RUN", file=sys.stderr)
        return 2
    try:
        clear(Path(words[0]), Path(words[1]))
    except (OSError, ValueError) as error:
        print(f"mntrain: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
