"""The state of a rank as others need it to tell who waits for whom."""

import os
import signal
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mntrain.comm import engine
from mntrain.comm.engine import ProgressEngine
from mntrain.comm.ticket import INTERNAL

_DEBUGGERS = ("/bdb.py", "/pdb.py", "/pydevd", "/debugpy/")
_LIBRARIES = [sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")]
_MAX_FRAMES = 30
READ_S = 1.0  # for the files of source code, whose file system may be what hangs
_COMM = str(Path(engine.__file__).parent)
START = "a call that all ranks make at the start of a world"
EXIT = "the exit"  # in place of a stream: ranks wait there for each other
STACK_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""Lets a rank print its stack, also while the interpreter is held in C code."""


@dataclass(frozen=True)
class StalledWait:
    """A collective that a rank has begun and waits for."""

    stream: str
    number: int  # in its stream
    what: str  # such as "bucket 3: all_reduce of 1024 float32"
    site: str  # file:line of the call
    seconds: float  # without any progress
    awaited_rank: int | None  # None: all ranks of the stream
    ranks: tuple[int, ...] | None = None  # of the stream; None: all of the world


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank at the time of a question."""

    rank: int
    host: str
    pid: int
    begun: Mapping[str, int]  # collectives, by stream
    wait: StalledWait | None
    stack: str  # of the training thread, innermost call last
    place: str  # of its innermost frame outside of libraries: "file:line in function"
    debugged: bool  # whether a debugger holds the training thread
    network: str = ""  # which nodes do not answer this one, and the fix

    def to_message(self) -> dict[str, Any]:
        """Return the status as a JSON object."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> "RankStatus":
        """Return the status of a JSON object. Raises KeyError and TypeError for another one."""
        values = {name: message[name] for name in cls.__dataclass_fields__}
        wait = values["wait"]
        if wait is not None:
            ranks = wait["ranks"]
            values["wait"] = StalledWait(**{**wait, "ranks": None if ranks is None else (*ranks,)})
        return cls(**values)


def own_status(
    rank: int,
    progress: ProgressEngine,
    thread: int,
    stalled_s: float,
    network: str = "",
    *,
    at_exit: bool = False,
) -> RankStatus:
    """Return the status of this rank, whose training runs in a thread. Local; takes about 1 ms.

    `stalled_s`: seconds in which it has waited without progress. `network`: which nodes do not
    answer.
    """
    frames = _frames(sys._current_frames().get(thread))
    names = [frame.f_code.co_filename for frame in frames]
    own = [frame for frame, name in zip(frames, names, strict=True) if _is_users(name)]
    innermost, wait = (own or frames)[-1:], _wait_of(progress, stalled_s)
    if wait is None and at_exit:
        wait = StalledWait(EXIT, 0, "its end", "", stalled_s, None)
    frames = [frame for frame in frames if not frame.f_code.co_filename.startswith("<frozen")]
    while wait is not None and frames and frames[-1].f_code.co_filename.startswith(_COMM):
        frames.pop()
    return RankStatus(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        begun={**{stream.name: stream.begun for stream in progress.streams}, EXIT: int(at_exit)},
        wait=wait,
        stack=_text(frames[-_MAX_FRAMES:]),
        place="".join(
            f"{f.f_code.co_filename}:{f.f_lineno} in {f.f_code.co_name}" for f in innermost
        ),
        debugged=any(part in name for name in names for part in _DEBUGGERS),
        network=network,
    )


def process_state(pid: int) -> str:
    """Return the state of a process of this host in words, "" if it is not known. Linux only."""
    words = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "ended"}
    words |= {"D": "blocked in the kernel, for example in file access", "X": "ended"}
    try:
        text = (
            Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
        )  # a name is any bytes
        state = text.rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "ended"
    except (OSError, IndexError):
        return ""
    return words.get(state, "running, but it does not answer: the interpreter is held in C code")


def _wait_of(progress: ProgressEngine, stalled_s: float) -> StalledWait | None:
    awaited = progress.awaited()
    if awaited is None:
        return None
    stream = awaited[0]
    if (ticket := stream.oldest) is None:  # of the start of the world, which the stack shows
        return StalledWait(stream.name, stream.begun, START, "", stalled_s, None, stream.ranks)
    what, rank = str(ticket.signature), stream.awaited_rank(ticket)
    return StalledWait(stream.name, ticket.number, what, ticket.site, stalled_s, rank, stream.ranks)


def _frames(frame: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _text(frames: list[FrameType]) -> str:
    """Return a stack with lines of source code, or without if their files cannot be read soon."""
    lines = [(frame, frame.f_lineno) for frame in frames]
    found: list[str] = []

    def read() -> None:
        found.append("".join(traceback.format_list(traceback.StackSummary.extract(iter(lines)))))

    thread = threading.Thread(target=read, daemon=True)
    with suppress(RuntimeError):  # the interpreter is about to end
        thread.start()
        thread.join(READ_S)
    names = ((f.f_code.co_filename, line, f.f_code.co_name) for f, line in lines)
    return found[0] if found else "".join('  File "{}", line {}, in {}\n'.format(*n) for n in names)


def _is_users(filename: str) -> bool:
    return not filename.startswith((*INTERNAL, *_LIBRARIES, "<"))
