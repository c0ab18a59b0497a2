"""One start of the command: its processes, its output, and the signals that are passed on to it."""

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import IO

from mntrain.launch.verdict import silent_hosts, tells_loss

# Of a terminal, for all of its processes; others are for the launcher alone, which passes them on.
_OF_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
SIGNALS = (*_OF_TERMINAL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# After the ranks' report of a loss, for them to end as they do, and for the launcher, which may
# wait for a node that is gone; then after SIGTERM.
_ENDING_S, _TERMINATING_S = 2.0, 1.0
_LINES = 4000  # of the output that are kept
_DRAIN_S = 2.0  # for output after the end, of which other processes may hold the pipe
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # of Linux
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class Signals:
    """Handlers that note the first signal, and pass all on to the command that runs, if one does.

    A context manager, of the main thread. Signals that are ignored stay ignored.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.first_at = 0.0
        """Time of its arrival, as time.monotonic()."""
        self._command: subprocess.Popen[bytes] | None = None

    def direct(self, command: subprocess.Popen[bytes] | None) -> None:
        """Pass signals on to a command from now on, or to none; also one that has come."""
        self._command = command
        if self.first is not None:
            self._pass_on(self.first, None)

    def __enter__(self) -> "Signals":
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) == self._pass_on:
                signal.signal(number, signal.SIG_DFL)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first, self.first_at = signal.Signals(number), time.monotonic()
        if self._command is not None:
            _send(self._command, number, group=number in _OF_TERMINAL)


class Start:
    """A start of a command, in a process group of its own. Its output is passed on unchanged.

    Where the command fails within a line of stderr, that is ended. It gets SIGTERM if this process
    ends before it in any way, on Linux. Made by the main thread, whose end the kernel looks at.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._within_line = False  # of stderr
        self._lost_at: float | None = None  # when the ranks have reported a loss
        self.silent: list[str] = []
        """Hosts of which no rank answers, by the last warning of the ranks that says so."""
        self.silent_at = -math.inf
        """Time of that warning, as time.monotonic()."""
        self.process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,  # of a terminal, which stops a group that reads from it
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - it needs no lock
        )
        pipes = [(self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)]
        self._threads = [
            threading.Thread(target=self._pass_on, args=(source, target.fileno()), daemon=True)
            for source, target in pipes
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, look: Callable[[], object]) -> int:
        """Return the exit code of the command, as a shell does; call `look` now and then.

        Where the ranks have reported a loss, the command is ended if it does not end by itself.
        """
        while True:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
                break
            look()
            if self._lost_at is not None and time.monotonic() > self._lost_at + _ENDING_S:
                self.end()
        code = self.process.returncode
        if code:  # after a clean end, what a script has started may go on
            _send(self.process, signal.SIGKILL, group=True)
        drained_by = time.monotonic() + _DRAIN_S
        for thread in self._threads:
            thread.join(max(0.0, drained_by - time.monotonic()))
        if code and self._within_line:
            with suppress(OSError):
                _write(sys.stderr.fileno(), b"\n")
        return 128 - code if code < 0 else code

    @property
    def lost(self) -> bool:
        """True once the ranks have reported the loss of a rank or node."""
        return self._lost_at is not None

    @property
    def output(self) -> str:
        """The last lines that the command has printed, on either stream, as they came."""
        return "".join(self._lines)

    def end(self) -> None:
        """End the command. Takes some seconds."""
        _send(self.process, signal.SIGTERM, group=True)
        try:
            self.process.wait(_TERMINATING_S)
        except subprocess.TimeoutExpired:
            _send(self.process, signal.SIGKILL, group=True)

    def _pass_on(self, source: IO[bytes], target: int) -> None:
        rest = b""
        while data := os.read(source.fileno(), 1 << 16):
            with suppress(OSError):  # nobody reads it: the command goes on
                _write(target, data)
            if target == sys.stderr.fileno():
                self._within_line = not data.endswith(b"\n")
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._note(line)
            rest = rest[-(1 << 16) :]
        self._note(rest)

    def _note(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._lines.append(text + "\n")
        if self._lost_at is None and tells_loss(text):
            self._lost_at = time.monotonic()
        if silent := silent_hosts(text):
            self.silent_at, self.silent = time.monotonic(), silent


def _end_with_parent() -> None:
    """Let the calling process get SIGTERM when its parent ends (man prctl)."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _write(target: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:
            time.sleep(0.01)


def _send(process: subprocess.Popen[bytes], number: int, *, group: bool) -> None:
    """Send a signal to a command that runs, or to all that is left of its process group."""
    with suppress(ProcessLookupError):
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
