"""Errors that all ranks agree on, and a clean end of the job for all others.

After an exception on one rank, the others would wait in a collective for ever. Errors that can
differ between ranks are therefore gathered and raised as one `AgreedError` on all of them; an
uncaught exception of any other kind prints its rank, host and traceback and aborts the job.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from numbers import Real
from typing import Any, NoReturn

from torch import nn

from mntrain.comm import mpi


class AgreedError(ValueError):
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


class TrainingStoppedError(AgreedError):
    """Training cannot continue, for a reason that all ranks know."""


class ExceptionWatch:
    """Hooks for uncaught exceptions that abort the whole job. One per world."""

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.rank, self.size, self.host = rank, size, host
        self._previous = sys.excepthook, threading.excepthook

    def install(self) -> None:
        """Replace the interpreter's hooks for uncaught exceptions of all threads."""
        self._previous = sys.excepthook, threading.excepthook
        sys.excepthook = self._handle_uncaught
        threading.excepthook = lambda args: self._handle_uncaught(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )

    def uninstall(self) -> None:
        """Restore the hooks that `install` replaced."""
        sys.excepthook, threading.excepthook = self._previous

    def end_job(self, error: BaseException) -> NoReturn:
        """Report `error` with rank and host, then abort all ranks. Does not return."""
        code = 1
        line = f"rank {self.rank} of {self.size} on {self.host} "
        if isinstance(error, KeyboardInterrupt):
            code, line = 130, "interrupted" if self.rank == 0 else ""
        elif isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
            line += f"left the job with exit code {error.code}"
        else:
            line += "failed:\n" + "".join(traceback.format_exception(error))
        if line:
            print("mntrain:", line, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.3)  # the launcher may drop what it has not forwarded before an abort
        mpi.abort(code)
        raise SystemExit(code)  # if the abort returned

    def _handle_uncaught(self, kind: Any, error: BaseException, trace: Any) -> None:
        if isinstance(error, AgreedError):
            error.report()
        elif self.size == 1:
            sys.__excepthook__(kind, error, trace)
        else:
            self.end_job(error)


def expect_same(values: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Raise AgreedError, as `rank`, unless all ranks gave equal values under each name.

    `values` are gathered, by rank. For lists, the message has the first items that differ.
    """
    for name, first in values[0].items():
        for other, given in enumerate(values):
            ours, theirs = first, given[name]
            if ours == theirs:
                continue
            if isinstance(ours, list):
                pairs = zip_longest(ours, theirs, fillvalue="no more")
                ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
            raise AgreedError(
                f"{name} differs between ranks: rank 0 has {ours}, rank {other} has {theirs}", rank
            )


def describe(model: nn.Module, options: Mapping[str, object]) -> dict[str, object]:
    """Return all properties of a model and of options that ranks must share, for `expect_same`."""
    tensors = [
        f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        + ("" if tensor.requires_grad else " frozen")
        + ("" if tensor.is_contiguous() else f" of strides {tensor.stride()}")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    return {**{name: _describe_option(v) for name, v in options.items()}, "the model": tensors}


def _describe_option(option: object) -> object:
    """Return text, a number or None as it is, and an object as its class and plain attributes."""
    if option is None or isinstance(option, str | Real):
        return option
    attributes = getattr(option, "__dict__", {}).items()
    plain = [(n, v) for n, v in attributes if isinstance(v, str | Real) and n[0] != "_"]
    return f"{type(option).__qualname__}({', '.join(f'{n}={v!r}' for n, v in plain)})"


def combined_refusals(refusals: Sequence[str | None]) -> str:
    """Return one sentence for the refusals of all ranks, by rank; None is no refusal."""
    if len(set(refusals)) == 1:
        return str(refusals[0])
    ranks_by_message: dict[str, list[int]] = {}
    for rank, message in enumerate(refusals):
        if message is not None:
            ranks_by_message.setdefault(message, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {message}"
        for message, ranks in ranks_by_message.items()
    )


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
    if any(refusals):
        raise AgreedError(combined_refusals(refusals), rank) from error
