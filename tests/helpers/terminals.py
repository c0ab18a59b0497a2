"""Pseudo-terminals of a given size, and what they got."""

import contextlib
import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator


class PseudoTerminal:
    """A pseudo-terminal; `file` is for the processes on it, and `output` is what they wrote."""

    def __init__(self, columns: int, lines: int) -> None:
        self._master, self.file = pty.openpty()
        self.resize(columns, lines)
        self._bytes = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    @property
    def output(self) -> str:
        return self._bytes.decode(errors="replace")

    def close(self) -> None:
        """Wait for the end of the output. All processes on the terminal have ended."""
        os.close(self.file)
        self._reader.join(10)
        os.close(self._master)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: no process has the terminal open
            while piece := os.read(self._master, 65536):
                self._bytes += piece


@contextlib.contextmanager
def pseudo_terminal(columns: int, lines: int = 24) -> Iterator[PseudoTerminal]:
    terminal = PseudoTerminal(columns, lines)
    try:
        yield terminal
    finally:
        terminal.close()
