"""The terminal that shows what this process prints, also through mpirun.

Launchers give a rank a pipe (MPICH's Hydra) or a pseudo-terminal (Open MPI), and copy what it
prints to their own output. If the launcher runs on the rank's host, it is an ancestor of the rank,
and /proc tells whether its output is a terminal. Nothing is written to that terminal directly.
"""

import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

# Beginnings of the names of processes that pass on the output of ranks. srun and prted are none:
# they pass it to another process, often on another host.
_LAUNCHERS = ("mpirun", "mpiexec", "hydra_", "prterun", "orterun")
# Options of launchers that add something to each line, or write the lines to files.
_LINE_OPTIONS = {
    dashes + name
    for dashes in ("-", "--")
    for name in (
        *("l", "prepend-rank", "outfile-pattern"),  # Hydra
        *("output", "output-filename", "tag-output", "timestamp-output", "xml"),  # Open MPI
    )
}
_PSEUDO_TERMINALS = 136  # the major number of /dev/pts/*


@dataclass(frozen=True)
class Terminal:
    """A terminal: a descriptor of this process, or the path of another process's, in /proc."""

    file: int | Path

    def size(self) -> os.terminal_size | None:
        """Return the present columns and lines; None if there are none or they cannot be read."""
        with suppress(OSError):
            if isinstance(self.file, int):
                size = os.get_terminal_size(self.file)
            else:
                descriptor = os.open(self.file, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
                try:
                    size = os.get_terminal_size(descriptor)
                finally:
                    os.close(descriptor)
            return size if size.columns and size.lines else None
        return None

    def shows(self, stream: Any) -> bool:
        """Return whether what is written to a file object is shown on this terminal, too."""
        other = find_terminal(stream)
        with suppress(OSError):
            return other is not None and os.stat(other.file).st_rdev == os.stat(self.file).st_rdev
        return False


def find_terminal(stream: Any) -> Terminal | None:
    """Return the terminal on which a user reads what is written to a file object, or None. Local.

    That is the terminal of the nearest launcher among the ancestors of this process if the launcher
    holds the other end of the file, which is a pipe or pseudo-terminal; otherwise the file itself.
    So there is none with `mpirun | tee`, `mpirun > file`, `python | grep` under mpirun, a launcher
    on another host, srun, and options that change lines (`mpirun -l`). Nor is there one if /proc
    cannot be read or the launcher's terminal is another user's. A terminal has a size: Open MPI
    gives ranks a pseudo-terminal without one if its own output is none.
    """
    try:
        number = stream.fileno()
        status = os.fstat(number)
    except (AttributeError, OSError, ValueError):  # absent, closed, or not a file
        return None
    own = Terminal(number)
    with suppress(OSError):
        launchers = _nearest_launchers(os.getpid())
        if launchers and _holds_other_end(launchers[0], status):
            process = Path("/proc", str(launchers[-1]))
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if _LINE_OPTIONS & set(words):
                return None
            terminal = Terminal(process / "fd" / ("2" if number == 2 else "1"))
            if terminal.size():
                return terminal
    return own if own.size() else None


def _nearest_launchers(pid: int) -> list[int]:
    """Return the nearest launcher among the ancestors of a process, and launchers right above it.

    Hydra has a proxy between mpirun and the ranks. Raises OSError if /proc cannot be read.
    """
    found: list[int] = []
    for ancestor, name in _ancestors(pid):
        if name.startswith(_LAUNCHERS):
            found.append(ancestor)
        elif found:
            break
    return found


def _ancestors(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the ids and names of the ancestors of a process, its parent first."""
    while pid > 1:
        pid = int(_stat(pid)[1].split()[1])
        if pid:
            yield pid, _stat(pid)[0]


def _stat(pid: int) -> tuple[str, str]:
    """Return a process's name, and the fields after it (proc(5)): state, parent, ..."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    name, _, fields = text.partition("(")[2].rpartition(")")
    return name, fields


def _holds_other_end(pid: int, file: os.stat_result) -> bool:
    """Return whether a process reads a pipe, or owns the pseudo-terminal, that is `file`.

    Raises OSError if its descriptors cannot be read.
    """
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if stat.S_ISFIFO(file.st_mode):
                reads = entry.lstat().st_mode & stat.S_IRUSR
                found = bool(reads) and os.path.samestat(entry.stat(), file)
            else:
                info = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
                index = re.search(r"^tty-index:\s*(\d+)$", info, re.MULTILINE)
                device = os.major(file.st_rdev), os.minor(file.st_rdev)
                found = index is not None and device == (_PSEUDO_TERMINALS, int(index[1]))
            if found:
                return True
    return False


def stdout() -> Console:
    """Return a console on stdout, which is a terminal if the user reads it on one.

    The environment may say otherwise: FORCE_COLOR, NO_COLOR and TTY_COMPATIBLE are rich's.
    """
    return console_on(find_terminal(sys.stdout))


def console_on(terminal: Terminal | None) -> Console:
    """Return a console on stdout, which is shown on `terminal`, with its present size."""
    size = terminal.size() if terminal else None
    if size is None:
        told = bool({"FORCE_COLOR", "TTY_COMPATIBLE"} & os.environ.keys())
        return Console(force_terminal=None if told else False)
    capable = os.environ.get("TTY_COMPATIBLE") != "0"
    return Console(force_terminal=capable, width=size.columns, height=size.lines)
