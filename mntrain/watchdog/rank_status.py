"""The state of a rank as others need it to tell who waits for whom."""

import os
import select
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mntrain.comm import engine
from mntrain.comm.engine import ProgressEngine
from mntrain.recorder.events import INTERNAL, LIBRARIES, read_process
from mntrain.recorder.late_ranks import Wait
from mntrain.recorder.stacks import stack_of
from mntrain.watchdog.unanswered import call_for

_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pydevd", "/debugpy/")
_DEBUGGER_MODULES = {"bdb", "pydevd", "debugpy"}  # one of which is loaded in a debugged process
UNKNOWN_PLACE = (
    "a line that is not known: its process has more than 100 threads, or no free file descriptor"
)
_NOT_USERS = (*INTERNAL, *LIBRARIES, "<")  # beginnings of file names
_MAX_FRAMES = 30
READ_S = 1.0  # for the files of source code, whose file system may be what hangs
_COMM = str(Path(engine.__file__).parent)
START = "a call that all ranks make at the start of a world"
EXIT = "the exit"  # in place of a stream: ranks wait there for each other
STACK_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""Signal that lets a rank print its stack, also while the interpreter is held in C code."""


class RankStatus(NamedTuple):
    """The state of one rank at the time of a question."""

    begun: Mapping[str, int]  # collectives, by stream
    wait: Wait | None
    stack: str  # of the training thread, innermost call last
    place: str  # of its innermost frame outside of libraries: "file:line in function"
    debugged: bool = False  # whether a debugger holds the training thread, or may hold it
    network: str = ""  # which nodes do not answer this one, and the fix
    limit: float | None = None  # seconds of `wait` that end the job
    idle_s: float = 0.0  # since this rank took part in a collective or a step
    unread: str = ""  # "stdout" or "stderr", if a write there waits for a reader

    @classmethod
    def from_message(cls, values: Mapping[str, Any]) -> "RankStatus":
        """Return the status that was sent as `_asdict()` in JSON."""
        status = cls(**values)
        return status._replace(wait=status.wait and Wait(*status.wait))


def own_status(
    progress: ProgressEngine,
    thread: int,
    stalled_s: float,
    network: str = "",
    *,
    limit: float | None,
    at_exit: bool = False,
    idle_s: float = 0.0,
) -> RankStatus:
    """Return the status of this rank, whose training runs in a thread. Local; takes about 1 ms.

    `stalled_s`: seconds in which it has waited without progress, of which `limit` end the job.
    `network`: which nodes do not answer. `idle_s`: seconds since it took part in anything.
    """
    places = stack_of(thread)[::-1]
    own = [place for place in places if not place[0].startswith(_NOT_USERS)]
    wait = _wait_of(progress, stalled_s)
    if wait is None and at_exit:
        wait = Wait(EXIT, 0, "its end", "", stalled_s)
    shown = [place for place in places if not place[0].startswith("<frozen")]
    while wait is not None and shown and shown[-1][0].startswith(_COMM):
        shown.pop()
    begun = {stream.name: stream.begun for stream in progress.streams}
    if wait is not None and wait.what == START:
        begun[wait.stream] += 1  # this rank is not late for the call in which it waits
    place = "".join(f"{file}:{line} in {name}" for file, line, name in (own or places)[-1:])
    debugged = any(part in file for file, _, _ in places for part in _DEBUGGERS)
    if not places:  # a job is not ended for what may be a debugger
        place, debugged = UNKNOWN_PLACE, not _DEBUGGER_MODULES.isdisjoint(sys.modules)
    return RankStatus(
        begun={**begun, EXIT: int(at_exit)},
        wait=wait,
        stack=_text(shown[-_MAX_FRAMES:]),
        place=place,
        debugged=debugged,
        network=network,
        limit=limit,
        idle_s=idle_s,
        unread=unread_output(),
    )


def unread_output() -> str:
    """Return "stdout" or "stderr" if a write there would wait for a reader, else "". Local.

    A terminal is held by Ctrl-S, and a pipe is full where its reader, such as `less`, has paused.
    """
    poll, names = select.poll(), {1: "stdout", 2: "stderr"}
    for descriptor in names:
        poll.register(descriptor, select.POLLOUT)
    ready = dict(poll.poll(0))  # with errors of closed ones, which writes raise at once
    return next((name for descriptor, name in names.items() if descriptor not in ready), "")


def process_state(pid: int) -> str:
    """Return the state of a process of this host in words. Linux only."""
    words = {"T": "stopped by a signal", "t": "stopped by a debugger", "": "ended"}
    words["D"] = "blocked in the kernel, for example in file access"
    state, _ = read_process(pid)
    return words.get(state, "running, but it does not answer: the interpreter is held in C code")


def print_stack(pid: int) -> None:
    """Let a rank of this host print its stack, if it runs: a stopped one would do so later."""
    if process_state(pid).startswith("running"):
        with suppress(OSError):
            os.kill(pid, STACK_SIGNAL)


def _wait_of(progress: ProgressEngine, stalled_s: float) -> Wait | None:
    if (awaited := progress.awaited()) is None:
        return None
    stream, _, own = awaited
    if own is not None and own.peers is not None and own.may_end is not None:
        call = str(own.signature), own.site, stalled_s, None, own.peers, True, own.may_end()
        return Wait(stream.name, 0, *call)
    if (ticket := stream.oldest) is None:  # the stack shows it
        return Wait(stream.name, stream.begun, START, "", stalled_s, None, stream.ranks)
    what, root = str(ticket.signature), stream.awaited_rank(ticket)
    return Wait(stream.name, ticket.number, what, ticket.site, stalled_s, root, stream.ranks)


def _text(frames: list[tuple[str, int, str]]) -> str:
    """Return a stack with lines of source code, or without if their files cannot be read soon."""
    found = ["".join(f'  File "{file}", line {line}, in {name}\n' for file, line, name in frames)]

    def read() -> None:
        summaries = [traceback.FrameSummary(*frame) for frame in frames]
        found.append("".join(traceback.StackSummary.from_list(summaries).format()))

    call_for(READ_S, read)
    return found[-1]
