"""Errors that all ranks agree on, and a clean end of the job for all others.

After an exception on one rank, the others would wait in a collective for ever. Errors that can
differ between ranks are therefore gathered and raised as one `AgreedError` on all of them; any
other uncaught exception prints its rank, host and traceback and aborts the job.
"""

import io
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from mntrain.alike.naming import by_value, naming
from mntrain.checks import launcher
from mntrain.checks.host import StartError
from mntrain.comm import mpi
from zero.collectives import AllRanksError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mntrain.watchdog.thread import Watchdog

OWN_THREAD = "mntrain "  # beginning of the names of this package's threads
REMOTE_ABORT_S = 10.0  # until a rank aborts the job, which the one that failed should have aborted
REPORT_S = 5.0  # that other ranks give the one that prints why MPI cannot start
_MAX_TRACEBACK, _MAX_MESSAGE = 20_000, 4_000  # characters that other ranks get


class AgreedError(AllRanksError, ValueError):
    """An error that every rank raises together; the world stays usable.

    `rank` is the raising rank: rank 0 reports the error to the user, the others stay silent.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def report(self) -> None:
        """Print the message on stderr if this is rank 0."""
        if self.rank == 0:
            print(f"mntrain: error: {self}", file=sys.stderr)


# For code that needs a process group of torch.distributed.
ADVICE = (
    "mntrain's ranks exchange data over MPI, without a process group of torch.distributed: in the "
    "place of DistributedDataParallel, fully_shard, accelerate's Accelerator and Hugging Face's "
    "Trainer, use world.optimizer and world.shard in a loop of your own (docs/own-loop.md), or "
    "python -m mntrain --task hf"
)
_WITH_BACKEND = (
    'call torch.distributed.init_process_group("mntrain") before, and '
    "destroy_process_group after all else"
)
_NO_GROUP = ("process group has not been initialized", "MASTER_ADDR expected", "RANK expected")


def raised_by_all(error: BaseException | None) -> bool:
    """Return True if all ranks leave a block together: without an error, or with one of all.

    False in a forked child of a rank, whose parent is in the block still.
    """
    clean_exit = isinstance(error, SystemExit) and error.code in (None, 0)
    together = error is None or isinstance(error, AllRanksError) or clean_exit
    return together and not mpi.of_parent()


class TrainingStoppedError(AgreedError):
    """Error that ends training, for a reason that all ranks know."""


class RemoteRankError(RuntimeError):
    """The error of another rank, which has failed: communication raises it on all others.

    `kind` is the name of its exception's class; that rank prints its `traceback` itself.
    """

    def __init__(self, rank: int, host: str, kind: str, message: str, traceback: str) -> None:
        super().__init__(
            f"rank {rank} on {host} failed with {kind}: {message}\nits traceback:\n{traceback}"
        )
        self.rank, self.host, self.kind, self.traceback = rank, host, kind, traceback


def advise(error: BaseException) -> None:
    """Add what to use instead to an error for want of a process group, as a note."""
    if any(sign in str(error) for sign in _NO_GROUP) and not hasattr(error, "__notes__"):
        has_backend = "mntrain.torch_backend" in sys.modules
        error.add_note(_WITH_BACKEND if has_backend else ADVICE)


class ExceptionWatch:
    """Hooks for uncaught exceptions, which abort the whole job. One per world.

    The user's own hooks, which were installed before, still report the exceptions. In a forked
    child of the rank, and after `uninstall`, they alone do.
    """

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank, self.size, self.host = rank, size, host
        # The newest hooks by their places; the argument of each is the hook that it has replaced.
        self._hooks: dict[Any, partial[None]] = {}
        self._process = 0  # the process that installed the hooks; 0: they are not installed
        self._handled: BaseException | None = None
        # Is told of an exception that ends the world, before anything else is done about it.
        self.on_error: Callable[[BaseException], None] = lambda error: None
        self.others: Watchdog | None = None

    def install(self) -> None:
        """Replace the interpreter's hooks for uncaught exceptions of all threads."""
        self._process = os.getpid()
        handlers: dict[Any, Callable[..., None]] = {
            sys: self._handle_uncaught,
            threading: self._handle_in_thread,
        }
        for module, handle in handlers.items():
            if not self._is_below(module.excepthook):
                module.excepthook = self._hooks[module] = partial(handle, module.excepthook)

    def uninstall(self) -> None:
        """Restore the hooks that `install` replaced, unless others have replaced these since.

        What stays in place only passes exceptions on.
        """
        self._process = 0
        for module, hook in self._hooks.items():
            if module.excepthook is hook:
                (module.excepthook,) = hook.args
                below = _watch_of(module.excepthook)
                if below is not None and not below._process:
                    below.uninstall()

    def _is_below(self, hook: Any) -> bool:
        """Return whether a hook is this watch's, or that of another one which calls it."""
        watch = _watch_of(hook)
        return watch is self or (watch is not None and self._is_below(hook.args[0]))

    def end_job(self, error: BaseException) -> NoReturn:
        """Report `error`, let the others leave with a `RemoteRankError`, then abort all ranks."""
        self._handled = error
        self.on_error(error)
        advise(error)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = 130
            if self.rank == 0:
                print("mntrain: interrupted", file=sys.stderr)
        elif isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
            line = f"{self._place} left the job with exit code {error.code}"
            print("mntrain:", line, file=sys.stderr)
        elif not isinstance(error, RemoteRankError):
            self._report_failure(error)
        if isinstance(sys.stderr, io.StringIO):  # torch.distributed's hook prints it after this one
            print(sys.stderr.getvalue(), end="", file=sys.__stderr__, flush=True)
        sys.stdout.flush()
        sys.stderr.flush()
        if self.others is not None:
            if not isinstance(error, RemoteRankError | KeyboardInterrupt):
                self.others.tell_failure(self.describe(error))
            self.end_run(error)
            self.others.leave()
        if isinstance(error, RemoteRankError):
            time.sleep(REMOTE_ABORT_S)
        mpi.abort(code)
        raise SystemExit(code)  # if the abort returned

    def end_run(self, error: BaseException) -> None:
        """Let the run's summary say that `error` has ended it. Local."""
        if self.others is not None and not isinstance(error, KeyboardInterrupt):
            own = f"{self._place} failed with {type(error).__name__}: {error}"
            text = str(error) if isinstance(error, RemoteRankError) else own
            self.others.end_run("crashed", text.partition("\n")[0])

    @property
    def _place(self) -> str:
        return f"rank {self.rank} of {self.size} on {self.host}"

    @property
    def _user_hook(self) -> Callable[..., object] | None:
        """The hook that the user has installed in place of the interpreter's, if any."""
        hook: Any = self._hooks[sys]
        while _watch_of(hook) is not None:
            (hook,) = hook.args
        return hook if hook is not sys.__excepthook__ else None

    def _report_failure(self, error: BaseException) -> None:
        """Print which rank failed; the user's hook, if any, reports the error itself."""
        line, text = f"mntrain: {self._place} failed:\n", "".join(traceback.format_exception(error))
        if self._user_hook is None:
            print(line + text, file=sys.stderr)
            return
        print(line, end="", file=sys.stderr, flush=True)
        try:
            self._user_hook(type(error), error, error.__traceback__)
        except Exception:
            print(text, file=sys.stderr)

    def describe(self, error: BaseException) -> dict[str, Any]:
        """Return the arguments of the RemoteRankError of an error."""
        text = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]
        own = {"rank": self.rank, "host": self.host, "kind": type(error).__name__}
        return {**own, "message": str(error)[:_MAX_MESSAGE], "traceback": text}

    def _unwrapped(self, error: BaseException) -> BaseException:
        """Return the error that has ended communication for what C++ has made of it.

        That is a RuntimeError with its text, where C++ has waited for a future of torch.
        """
        first = None if self.others is None else self.others.communication_error
        return first if first is not None and str(first) in str(error) else error

    def _handle_uncaught(
        self, replaced: Callable[..., object], kind: Any, error: BaseException, trace: Any
    ) -> None:
        error = self._unwrapped(error)
        of_all = isinstance(error, AllRanksError)  # rank 0 alone prints it
        # A hook of the user's passes an error on to the one that it has replaced: this one, if it
        # was installed again since.
        if self._process != os.getpid() or error is self._handled:
            replaced(kind, error, trace)
            return
        self._handled = error
        if self.size > 1 and not of_all:
            self.end_job(error)
        self.on_error(error)
        if isinstance(error, AgreedError):
            error.report()
            self._report_before(error)
            if self.rank == 0 and self._user_hook is not None:
                self._user_hook(kind, error, trace)
        elif self.rank == 0 or not of_all:
            replaced(kind, error, trace)

    def _report_before(self, error: AgreedError) -> None:
        """Print what this rank had raised, if other ranks had not: by then their calls differed."""
        first = None if self.others is None else self.others.communication_error
        before = error.__cause__ or error.__context__
        if error is first and before is not None:
            of_all = isinstance(before, AgreedError)
            text = str(before) if of_all else "\n" + "".join(traceback.format_exception(before))
            print(f"mntrain: error: {self._place} had raised: {text}", file=sys.stderr)

    def _handle_in_thread(
        self, replaced: Callable[..., object], args: threading.ExceptHookArgs
    ) -> None:
        """End the job for threads of this package; let others end with a report, as Python does."""
        error = args.exc_value or args.exc_type()
        thread = args.thread.name if args.thread else ""
        if self._process == os.getpid() and self.size > 1 and error is not self._handled:
            self._handled = error
            if thread.startswith(OWN_THREAD):
                self.end_job(error)
            if not isinstance(error, SystemExit):
                print(f"mntrain: {self._place}: an exception ends {thread}", file=sys.stderr)
        try:
            replaced(args)
        finally:  # the job goes on: what the thread's frames hold is no longer needed
            if self._handled is error:
                self._handled = None


def _watch_of(hook: Any) -> ExceptionWatch | None:
    """Return the watch that has installed a hook, if one has."""
    watch = getattr(hook.func, "__self__", None) if isinstance(hook, partial) else None
    return watch if isinstance(watch, ExceptionWatch) else None


def combined_refusals(refusals: Sequence[str | None]) -> str:
    """Return one sentence for the refusals of all ranks, by rank; None is no refusal."""
    if len(set(refusals)) == 1:
        return str(refusals[0])
    by_rank = {rank: message for rank, message in enumerate(refusals) if message is not None}
    return "; ".join(f"{naming('rank', ranks)}: {message}" for message, ranks in by_value(by_rank))


@contextmanager
def agreement(gather: Callable[[str | None], Sequence[str | None]], rank: int) -> Iterator[None]:
    """Run a block that may fail on any rank, and fail on all ranks together. Collective.

    `gather` returns every rank's object, by rank. A ValueError, OSError, ImportError or
    RuntimeError of the block becomes an AgreedError on every rank, which names the failed ranks
    unless all failed alike. Collectives within the block must come before all that can raise.
    """
    error: Exception | None = None
    try:
        yield
    except AgreedError:
        raise
    except (ValueError, OSError, ImportError, RuntimeError) as raised:
        error = raised
    refusals = gather(None if error is None else str(error) or type(error).__name__)
    try:
        if any(refusals):
            raise AgreedError(combined_refusals(refusals), rank) from error
    finally:
        del error  # its traceback holds this frame, and so what the block has made


def start_mpi(comm: "MPI.Intracomm | None" = None) -> tuple[mpi.Communicator, mpi.MpiLibrary]:
    """Start MPI as `mpi.start` does. Raises AgreedError where it raises StartError.

    Ranks that cannot communicate leave the report to rank 0 of the job, or of the host if the
    reason is there. The others wait, since launchers end all ranks when one exits.
    """
    try:
        return mpi.start(comm)
    except StartError as error:
        names = launcher.LOCAL_RANK_VARIABLES if error.on_host else launcher.RANK_VARIABLES
        rank = launcher.first_number(os.environ, names) or 0
        ExceptionWatch(rank, 1, socket.gethostname()).install()  # silent if nobody catches it
        if rank:
            time.sleep(REPORT_S)
        where = f"{socket.gethostname()}: " if error.on_host else ""
        raise AgreedError(f"{where}{error}", rank) from error
