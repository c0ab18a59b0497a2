"""The stack of another thread of this process, which may be running."""

import faulthandler
import os
import re
from tempfile import TemporaryFile

_LINUX = hasattr(os, "memfd_create")
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\n((?:  File .*\n)*)", re.M)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


def stack_of(thread: int) -> list[tuple[str, int, str]]:
    """Return the file, the line and the function of each frame of a thread, the innermost first.

    Local; empty for a thread that has ended, or that 100 newer ones hide, and if no file can be
    made. In one call of C code, which holds the interpreter all the time: who walks
    `sys._current_frames()` while the thread goes on reads frames that are freed by then, of which
    Python 3.11 dies (github.com/python/cpython/issues/111363). At most the innermost 100 frames of
    each of the newest 100 threads; names are cut after 500 characters.
    """
    # Not on a disk where that can be helped: its file system may be what hangs.
    try:
        with os.fdopen(os.memfd_create("stacks"), "w+b") if _LINUX else TemporaryFile() as file:
            faulthandler.dump_traceback(file.fileno())
            file.seek(0)
            text = file.read().decode()
    except OSError:  # no descriptor is free, or the system forbids it
        return []
    stacks = {int(number, 16): frames for number, frames in _THREAD.findall(text)}
    return [
        (_plain(name), int(line), _plain(function))
        for name, line, function in _FRAME.findall(stacks.get(thread, ""))
    ]


def _plain(name: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[0][2:], 16)), name)
