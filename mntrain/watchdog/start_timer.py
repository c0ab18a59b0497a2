"""Limits to the time in which ranks wait for each other where the watchdog cannot tell."""

import faulthandler
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from numbers import Real

from mntrain.checks.launcher import (
    LOCAL_RANK_VARIABLES,
    RANK_VARIABLES,
    SIZE_VARIABLES,
    first_number,
    local_size,
)
from mntrain.watchdog import unanswered
from mntrain.watchdog.side_channel import LOST_S

TIMEOUT_S = 600.0  # the default of a world
LEAST_S = 60.0  # imports from a cold file system may take so long on one rank
_MOST_S = 1e8
_APART_S, _APART = 2.0, 4  # between the ends of the first ranks: one report ends the job
_END_S = 5.0  # for the process that watches the network to end
_watched = threading.Lock()  # held while a block is


@contextmanager
def limited_start(timeout: float | None = TIMEOUT_S, lost_after: float = LOST_S) -> Iterator[None]:
    """End this process if the block, in which ranks meet, takes longer than the timeout. Local.

    `timeout` is in seconds, as of `mntrain.init`, and counts as at least LEAST_S; None is none, and
    for what is no number the default counts. The first rank of the launcher that is here prints its
    stack; nobody knows yet which rank is late. The timer is that of `faulthandler`, the only one
    that works while MPI_Init keeps the interpreter: it replaces one that the user has set. Before
    the limit, warnings name nodes that do not answer, and the rank is killed after `lost_after`
    seconds without an answer on one connection, unless there is no timeout (`network_watched`).
    """
    alone = (first_number(os.environ, SIZE_VARIABLES) or 1) == 1
    if timeout is not None and not (isinstance(timeout, Real) and timeout > 0):
        timeout = TIMEOUT_S  # it is refused later
    if timeout is None or not (isinstance(lost_after, Real) and lost_after > 0):
        lost_after = math.inf
    with limited_end(None if alone else timeout), network_watched(lost_after=lost_after):
        yield


@contextmanager
def limited_end(timeout: float | None) -> Iterator[None]:
    """End this process if the block, in which all ranks end MPI, takes longer. Local.

    As `limited_start`: MPI_Finalize keeps the interpreter, too.
    """
    if timeout is None:
        yield
        return
    seconds = min(max(float(timeout), LEAST_S), _MOST_S)
    seconds += _APART_S * min(first_number(os.environ, RANK_VARIABLES) or 0, _APART)
    with suppress(
        RuntimeError
    ):  # no more threads are allowed: the next one is told of on all ranks
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def network_watched(
    kill_after: float = math.inf, lost_after: float = math.inf
) -> Iterator[Callable[[], None]]:
    """Let a process tell on stderr, beside the block, which nodes do not answer. Local.

    Gives a function that tells of progress: the time starts anew. One sentence names connections
    that are not answered after `unanswered.SURE_S`; after `unanswered.WARN_S` rank 0 tells that it
    waits. With `kill_after`, in seconds, the rank is killed after the first, and after these
    seconds without progress in any case; with `lost_after`, after these seconds in which one
    connection is not answered. Works while MPI_Init keeps the interpreter. Does nothing within
    another such block, if the launcher has started all ranks on this host, and for a rank other
    than the first here.
    """
    first = _watched.acquire(blocking=False)
    process = _start(kill_after, lost_after) if first else None

    def write(line: bytes) -> None:
        if process is not None and process.stdin is not None:
            with suppress(OSError):  # it has ended
                os.write(process.stdin.fileno(), line)

    try:
        yield lambda: write(b"\n")
    finally:
        write(b"end\n")
        if first:
            _watched.release()
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_END_S)


def _start(kill_after: float, lost_after: float) -> "subprocess.Popen[bytes] | None":
    """Start the process, if this rank is the first of several nodes' ranks on its own."""
    others = (first_number(os.environ, SIZE_VARIABLES) or 1) - local_size(os.environ)
    rank = first_number(os.environ, RANK_VARIABLES) or 0
    # Without a number of its own on the host, rank 0 alone.
    if others <= 0 or first_number(os.environ, (*LOCAL_RANK_VARIABLES, *RANK_VARIABLES)):
        return None
    if sys.platform != "linux" or not sys.executable:
        return None
    words = map(str, (os.getpid(), rank, others, kill_after, lost_after))
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", unanswered.__file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:  # no more processes are allowed
        return None
