"""The state of a rank: whether its output is read, and for what it is late."""

import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from waiting import until

from mntrain.recorder.late_ranks import late_ranks
from mntrain.watchdog.rank_status import UNKNOWN_PLACE, own_status, process_state, unread_output


@contextmanager
def in_place_of(descriptor, other):
    """Let a standard descriptor be another one for a while."""
    kept = os.dup(descriptor)
    os.dup2(other, descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def fill(descriptor):
    os.set_blocking(descriptor, False)
    try:
        while True:
            os.write(descriptor, b"x" * 4096)
    except BlockingIOError:
        pass


@pytest.mark.parametrize(("descriptor", "name"), [(1, "stdout"), (2, "stderr")])
def test_a_full_pipe_and_a_held_terminal_are_unread(descriptor, name):
    assert unread_output() == ""  # of files
    reader, writer = os.pipe()
    with in_place_of(descriptor, writer):
        assert unread_output() == ""
        fill(writer)
        assert unread_output() == name
        os.read(reader, 1 << 20)
        assert unread_output() == ""
        fill(writer)
        os.close(reader)  # then a write raises
        assert unread_output() == ""
    os.close(writer)
    keyboard, terminal = pty.openpty()
    with in_place_of(descriptor, terminal):
        assert unread_output() == ""
        termios.tcflow(terminal, termios.TCOOFF)  # as Ctrl-S
        assert unread_output() == name
        termios.tcflow(terminal, termios.TCOON)
        assert unread_output() == ""
    os.close(keyboard)
    os.close(terminal)


def test_a_rank_is_not_late_for_the_call_at_the_start_in_which_it_waits():
    stream = SimpleNamespace(name="the world", begun=2, oldest=None, ranks=None)
    engine = SimpleNamespace(streams=[stream], awaited=lambda: (stream, 0.0, None))
    status = own_status(engine, 0, 20.0, limit=None)
    assert status.wait.number == 2
    other = {"the world": 2}  # has not begun it
    assert late_ranks(status.wait, {0: status.begun, 1: other}) == {1}


def test_a_process_that_does_not_answer_is_stopped_held_or_has_ended():
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            until(lambda: "held in C code" in process_state(process.pid))
            process.send_signal(signal.SIGSTOP)
            until(lambda: process_state(process.pid) == "stopped by a signal")
            process.send_signal(signal.SIGCONT)  # as after a debugger or a scheduler
            until(lambda: "held in C code" in process_state(process.pid))
        finally:
            process.kill()
    assert process_state(process.pid) == "ended"


def test_a_thread_that_newer_ones_hide_is_at_an_unknown_line_and_maybe_in_a_debugger(monkeypatch):
    idle = SimpleNamespace(awaited=lambda: None, streams=[])
    ended, main = threading.Event(), threading.get_ident()
    threads = [threading.Thread(target=ended.wait) for _ in range(110)]
    for thread in threads:
        thread.start()
    try:
        for module in ("bdb", "pydevd", "debugpy"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        status = own_status(idle, main, 0.0, limit=None)
        assert (status.place, status.stack, status.debugged) == (UNKNOWN_PLACE, "", False)
        monkeypatch.setitem(sys.modules, "bdb", None)
        assert own_status(idle, main, 0.0, limit=None).debugged
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    status = own_status(idle, main, 0.0, limit=None)
    assert f"{__file__}:" in status.place
    assert not status.debugged
