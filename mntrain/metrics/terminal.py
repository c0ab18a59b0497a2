"""The terminal that shows what this process prints, also through mpirun, and live lines on it.

Launchers give a rank a pipe (MPICH's Hydra) or a pseudo-terminal (Open MPI), and copy what it
prints to their own output. If the launcher runs on the rank's host, it is an ancestor of the rank,
and /proc tells whether its output is a terminal. Nothing is written to that terminal directly.

Live lines are redrawn in place. Between redraws, the cursor is at the beginning of the first of
them, which is empty. So a redraw needs not know what was drawn or how the terminal has been resized
since: it draws from the cursor on and erases what is below. A line that another process prints
meanwhile takes the place of the empty one, further lines overwrite the beginning of the others, and
the next redraw is below them. The cursor stays visible: a job that is killed leaves a terminal in
order.
"""

import os
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, TypeAlias, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment, Segments
from rich.text import Text

# Beginnings of the names of processes that pass on the output of ranks. srun and prted are none:
# they pass it to another process, often on another host.
_LAUNCHERS = ("mpirun", "mpiexec", "hydra_", "prterun", "orterun")
# Options of launchers that add something to each line, or write the lines to files.
_LINE_OPTIONS = {
    *("l", "prepend-rank", "outfile-pattern"),  # Hydra
    *("output", "output-filename", "tag-output", "timestamp-output", "xml"),  # Open MPI
}


Terminal: TypeAlias = int | Path
"""A terminal: a descriptor of this process, or the path of another process's, in /proc."""


def size_of(terminal: Terminal | None) -> os.terminal_size | None:
    """Return the present columns and lines; None if there are none or they cannot be read."""
    with suppress(OSError):
        if isinstance(terminal, int):
            size = os.get_terminal_size(terminal)
        elif terminal is None:
            return None
        else:
            descriptor = os.open(terminal, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
            try:
                size = os.get_terminal_size(descriptor)
            finally:
                os.close(descriptor)
        return size if size.columns and size.lines else None
    return None


def find_terminal(stream: Any) -> Terminal | None:
    """Return the terminal on which a user reads what is written to a file object, or None. Local.

    For a pipe or pseudo-terminal under a launcher, that is the launcher's terminal; otherwise the
    file itself. So there is none with `mpirun | tee`, `mpirun > file`, a launcher on another host,
    srun, and options that change lines (`mpirun -l`). Nor is there one if /proc cannot be read or
    the launcher's terminal is another user's. A terminal has a size: Open MPI gives ranks a
    pseudo-terminal without one if its own output is none.
    """
    try:
        number: int = stream.fileno()
        passed_on = stat.S_ISFIFO(os.fstat(number).st_mode) or os.isatty(number)
    except (AttributeError, OSError, ValueError):  # absent, closed, or not a file
        return None
    with suppress(OSError):
        launchers = _nearest_launchers(os.getpid())
        if launchers and passed_on:
            process = Path("/proc", str(launchers[-1]))
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if _LINE_OPTIONS & {word.lstrip("-") for word in words if word.startswith("-")}:
                return None
            terminal = process / "fd" / ("2" if number == 2 else "1")
            if size_of(terminal):
                return terminal
    return number if size_of(number) else None


def _nearest_launchers(pid: int) -> list[int]:
    """Return the nearest launcher among the ancestors of a process, and launchers right above it.

    Hydra has a proxy between mpirun and the ranks. Raises OSError if /proc cannot be read.
    """
    found: list[int] = []
    while (pid := _parent_and_name(pid)[0]) > 0:
        if _parent_and_name(pid)[1].startswith(_LAUNCHERS):
            found.append(pid)
        elif found:
            break
    return found


def _parent_and_name(pid: int) -> tuple[int, str]:
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    name, _, fields = text.partition("(")[2].rpartition(")")
    return int(fields.split()[1]), name


def stdout() -> Console:
    """Return a console on stdout, which is a terminal if the user reads it on one.

    The environment may say otherwise: FORCE_COLOR, NO_COLOR and TTY_COMPATIBLE are rich's.
    """
    return console_on(find_terminal(sys.stdout))


def console_on(terminal: Terminal | None) -> Console:
    """Return a console on stdout, which is shown on `terminal`, with its present size."""
    size = size_of(terminal)
    if size is None:
        told = bool({"FORCE_COLOR", "TTY_COMPATIBLE"} & os.environ.keys())
        return Console(force_terminal=None if told else False)
    capable = os.environ.get("TTY_COMPATIBLE") != "0"
    return Console(force_terminal=capable, width=size.columns, height=size.lines)


def _control(sequence: str) -> Segment:
    """Return a segment with an escape sequence, which rich counts as no text."""
    return Segment(sequence, None, [(ControlType.CLEAR,)])


_NO_WRAP, _WRAP = _control("\x1b[?7l"), _control("\x1b[?7h")
_LINE_START, _ERASE_LINE, _ERASE_BELOW = _control("\r"), _control("\x1b[K"), _control("\x1b[J")


def fit(parts: Sequence[str], width: int) -> str:
    """Return a line of the first parts, as many as fit into `width` cells, and at least one."""
    line = parts[0]
    for part in parts[1:]:
        if cell_len(f"{line}  {part}") > width:
            break
        line = f"{line}  {part}"
    return line


class LiveLines(RenderHook):
    """Live lines on a console: an empty one, and those of `lines(width)`, which fit into width.

    The first of them are the most important: a low terminal gets only those. What the console
    prints appears above them, as does what this process writes to stdout, and to stderr with
    `takes_stderr`. `terminal` is asked for its size at each redraw; without one the console is.
    There is no refresh thread, which would compete with training for the interpreter.
    """

    def __init__(
        self,
        console: Console,
        lines: Callable[[int], Sequence[Text]],
        terminal: Terminal | None = None,
        *,
        takes_stderr: bool = True,
    ) -> None:
        self._console, self._lines, self._terminal = console, lines, terminal
        self._lock = threading.Lock()
        self._open, self._ends = True, False
        self._streams = sys.stdout, sys.stderr
        sys.stdout = self._redirect(sys.stdout)
        if takes_stderr:
            sys.stderr = self._redirect(sys.stderr)
        console.push_render_hook(self)

    def _redirect(self, stream: TextIO) -> TextIO:
        return stream if stream is None else cast(TextIO, FileProxy(self._console, stream))

    def refresh(self) -> None:
        """Redraw the lines."""
        self._console.print(Control())

    def stop(self) -> None:
        """Redraw the lines for the last time, and leave the cursor below them. Once."""
        with self._lock:  # a thread that ends the job may be here first
            stops, self._open = self._open, False
        if stops:
            sys.stdout, sys.stderr = self._streams
            self._ends = True
            self.refresh()
            self._console.pop_render_hook()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Return what the console prints, with the live lines below it. Called by rich."""
        start = [_LINE_START]
        if size := size_of(self._terminal):
            self._console.size = size.columns, size.lines
            # These spaces end a line that another process has begun: only from the first column
            # do they fit into one.
            start = [_control(" " * size.columns), _LINE_START]
        prints = not all(isinstance(renderable, Control) for renderable in renderables)
        above = [*start, _ERASE_BELOW] if prints else start
        return [Segments(above), *renderables, Segments(self._frame())]

    def _frame(self) -> list[Segment]:
        """Return the live lines, erasing what was there, and the way back to the first of them."""
        # A line that fills the terminal's last column would make some terminals begin another. In
        # a terminal of unknown width, longer lines are cut.
        width, height = max(1, self._console.width - 1), self._console.height
        texts = list(self._lines(width))[:height]
        if len(texts) < height:
            texts.insert(0, Text())
        segments = [_NO_WRAP]
        for number, text in enumerate(texts):
            text.truncate(width)
            row = [] if number == 0 else [Segment.line()]
            segments += [*row, *text.render(self._console), _ERASE_LINE]
        segments += [_ERASE_BELOW, _WRAP]
        if self._ends:
            return [*segments, Segment.line()]
        up = [_control(f"\x1b[{len(texts) - 1}A")] if len(texts) > 1 else []
        return [*segments, *up, _LINE_START]
