"""The watch over the network between nodes while ranks cannot tell each other anything."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from mntrain.checks.launcher import (
    LOCAL_RANK_VARIABLES,
    RANK_VARIABLES,
    SIZE_VARIABLES,
    first_number,
    local_size,
)
from mntrain.watchdog import unanswered

_END_S = 5.0  # for the process to end
_WATCHED: ContextVar[bool] = ContextVar("network watched", default=False)


@contextmanager
def network_watched(kill_after: float | None = None) -> Iterator[Callable[[], None]]:
    """Let a process tell on stderr, beside the block, which nodes do not answer. Local.

    Gives a function that tells of progress: the time starts anew. One sentence names connections
    that are not answered after `unanswered.SURE_S`; after `unanswered.WARN_S` rank 0 tells that it
    waits. With `kill_after`, in seconds, the rank is killed after the first, and after these
    seconds without progress in any case. Works while MPI_Init keeps the interpreter. Does nothing
    within another such block, if the launcher has started all ranks on this host, and for a rank
    other than the first here.
    """
    process = None if _WATCHED.get() else _start(kill_after)

    def write(line: bytes) -> None:
        if process is not None and process.stdin is not None:
            with suppress(OSError):  # it has ended
                os.write(process.stdin.fileno(), line)

    token = _WATCHED.set(True)
    try:
        yield lambda: write(b"\n")
    finally:
        _WATCHED.reset(token)
        write(b"end\n")
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)


def _start(kill_after: float | None) -> "subprocess.Popen[bytes] | None":
    """Start the process, if this rank is the first of several nodes' ranks on its own."""
    others = (first_number(os.environ, SIZE_VARIABLES) or 1) - local_size(os.environ)
    rank = first_number(os.environ, RANK_VARIABLES) or 0
    # Without a number of its own on the host, rank 0 alone.
    if others <= 0 or first_number(os.environ, (*LOCAL_RANK_VARIABLES, *RANK_VARIABLES)):
        return None
    if sys.platform != "linux" or not sys.executable:
        return None
    words = [os.getpid(), rank, others, "none" if kill_after is None else kill_after]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", unanswered.__file__, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:  # no more processes are allowed
        return None
