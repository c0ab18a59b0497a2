"""Limits to the time in which ranks wait for each other where the watchdog cannot tell."""

import faulthandler
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from numbers import Real

from mntrain.checks.launcher import RANK_VARIABLES, SIZE_VARIABLES, first_number
from mntrain.watchdog.network_watch import network_watched

TIMEOUT_S, WARN_AFTER_S = 600.0, 60.0  # the defaults of a world
LEAST_S = 60.0  # imports from a cold file system may take so long on one rank
_MOST_S = 1e8
_APART_S, _APART = 2.0, 4  # between the ends of the first ranks: one report ends the job


def is_positive(limit: object) -> bool:
    """Return whether a time limit is a number above 0."""
    return isinstance(limit, Real) and float(limit) > 0


@contextmanager
def limited_start(timeout: float | None = TIMEOUT_S) -> Iterator[None]:
    """End this process if the block, in which ranks meet, takes longer than the timeout. Local.

    `timeout` is in seconds, as of `mntrain.init`, and counts as at least LEAST_S; None is none, and
    for what is no number the default counts. The first rank of the launcher that is here prints its
    stack; nobody knows yet which rank is late. The timer is that of `faulthandler`, the only one
    that works while MPI_Init keeps the interpreter: it replaces one that the user has set. Before
    the limit, warnings name nodes that do not answer (`network_watched`).
    """
    if timeout is None or (first_number(os.environ, SIZE_VARIABLES) or 1) == 1:
        with network_watched():
            yield
        return
    given = timeout if is_positive(timeout) else TIMEOUT_S
    with _timer(float(given)), network_watched():
        yield


@contextmanager
def limited_end(timeout: float | None) -> Iterator[None]:
    """End this process if the block, in which all ranks end MPI, takes longer. Local.

    As `limited_start`: MPI_Finalize keeps the interpreter, too.
    """
    with nullcontext() if timeout is None else _timer(timeout):
        yield


@contextmanager
def _timer(timeout: float) -> Iterator[None]:
    seconds = min(max(timeout, LEAST_S), _MOST_S)
    seconds += _APART_S * min(first_number(os.environ, RANK_VARIABLES) or 0, _APART)
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
