"""When something breaks: one clean error for what all ranks agree on, a quick end for the rest.

An exception on one rank leaves the others waiting in a collective, under every launcher, unless it
ends the job. So an uncaught one prints its rank, host and traceback and aborts the world.
"""

import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

from mntrain.comm import mpi

_FORWARD_S = 0.3  # in which the launcher passes on what was said; after an abort it may not


class AgreedError(ValueError):
    """What every rank raises alike, after all have heard of it; the world is still in order.

    `rank` is the one that raises it: rank 0 is to tell the user, the others to be silent.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def tell(self) -> None:
        """Print the message as a user's error, if this is rank 0."""
        if self.rank == 0:
            print(f"mntrain: error: {self}", file=sys.stderr)


class TrainingStoppedError(AgreedError):
    """Training cannot go on; all ranks know why."""


class ExceptionWatch:
    """Ends the whole job for an exception that nobody caught. One a world."""

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank, self.size, self.host = rank, size, host
        self._before = sys.excepthook, threading.excepthook

    def install(self) -> None:
        """Take over the interpreter's hooks for uncaught exceptions, of all threads."""
        self._before = sys.excepthook, threading.excepthook
        sys.excepthook = self._uncaught
        threading.excepthook = lambda args: self._uncaught(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )

    def uninstall(self) -> None:
        """Give the hooks back."""
        sys.excepthook, threading.excepthook = self._before

    def end_job(self, error: BaseException) -> NoReturn:
        """Say what happened to this rank, and end all ranks. Does not return."""
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = 130
            if self.rank == 0:
                print("mntrain: interrupted", file=sys.stderr)
        elif isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
            self._say(f"left the job with exit code {error.code}")
        else:
            self._say("failed:\n" + "".join(traceback.format_exception(error)))
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_FORWARD_S)
        mpi.abort(code)
        raise SystemExit(code)  # an abort that came back

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, AgreedError):
            error.tell()
        elif self.size == 1:
            sys.__excepthook__(kind, error, trace)
        else:
            self.end_job(error)

    def _say(self, what: str) -> None:
        print(f"mntrain: rank {self.rank} of {self.size} on {self.host} {what}", file=sys.stderr)
