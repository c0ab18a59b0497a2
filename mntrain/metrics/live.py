"""Lines at the end of a terminal's text that are redrawn in place.

Between redraws, the cursor is at the beginning of the first of these lines, which is empty. So a
redraw needs not know what was drawn or how the terminal has been resized since: it draws from the
cursor on and erases what is below. A line that another process prints meanwhile takes the place of
the empty one, further lines overwrite the beginning of the others, and the next redraw is below
them. The cursor stays visible: a job that is killed leaves a terminal in order.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TextIO, cast

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment
from rich.text import Text

from mntrain.metrics.terminal import Terminal


def _control(sequence: str) -> Segment:
    """Return a segment with an escape sequence, which rich counts as no text."""
    return Segment(sequence, None, [(ControlType.CLEAR,)])


_NO_WRAP, _WRAP = _control("\x1b[?7l"), _control("\x1b[?7h")
_LINE_START, _ERASE_LINE, _ERASE_BELOW = _control("\r"), _control("\x1b[K"), _control("\x1b[J")


def fit(parts: Sequence[tuple[int, str]], width: int) -> str:
    """Return a line of parts that fits into `width` cells.

    A part is its priority, 0 for the most important, and its text. Those with the highest number
    are left out until the others fit, of equal ones the last. A single part is cut.
    """
    kept = list(parts)
    while len(kept) > 1 and cell_len(join(kept)) > width:
        kept.remove(max(reversed(kept), key=lambda part: part[0]))
    return set_cell_size(join(kept), min(width, cell_len(join(kept))))


def join(parts: Sequence[tuple[int, str]]) -> str:
    """Return the texts of parts as one line."""
    return "  ".join(text for _, text in parts)


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
        if self._terminal and (size := self._terminal.size()):
            self._console.size = size.columns, size.lines
            # These spaces end a line that another process has begun: only from the first column
            # do they fit into one.
            start = [_control(" " * size.columns), _LINE_START]
        prints = not all(isinstance(renderable, Control) for renderable in renderables)
        above = [*start, _ERASE_BELOW] if prints else start
        return [_Segments(above), *renderables, _Segments(self._frame())]

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

    def _redirect(self, stream: TextIO) -> TextIO:
        return stream if stream is None else cast(TextIO, FileProxy(self._console, stream))


class _Segments:
    """Segments, as rich prints them."""

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._segments
