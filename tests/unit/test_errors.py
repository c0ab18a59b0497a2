"""Hooks for uncaught exceptions, which end the job."""

import contextlib
import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

from mntrain import errors
from mntrain.comm import mpi
from mntrain.errors import AgreedError, ExceptionWatch, RemoteRankError


class AbortedError(Exception):
    """An exception in place of the end of the job."""


@pytest.fixture(autouse=True)
def own_hooks(monkeypatch):
    """Abort by an exception, and restore the interpreter's hooks."""

    def abort(code):
        raise AbortedError(code)

    monkeypatch.setattr(mpi, "abort", abort)
    monkeypatch.setattr(errors.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)


@pytest.fixture
def told(monkeypatch):
    """The errors that a hook of the user's has got."""
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    return seen


def installed(rank=1, size=4):
    watch = ExceptionWatch(rank, size, "host")
    watch.install()
    return watch


def leave_uncaught(error):
    """Do what the interpreter does with an exception that nobody catches."""
    try:
        raise error
    except type(error):
        sys.excepthook(*sys.exc_info())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_users_hook_is_called_once_by_two_worlds_and_is_back_when_both_are_closed(told, order):
    before = sys.excepthook, threading.excepthook
    watches = installed(), installed()
    watches[order[1]].install()
    errors = KeyError("of two"), KeyError("after the first")
    for error, index in zip(errors, order, strict=True):
        with pytest.raises(AbortedError):
            leave_uncaught(error)
        watches[index].uninstall()
    assert told == list(errors)
    assert (sys.excepthook, threading.excepthook) == before


@pytest.mark.parametrize("of_all", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_a_hook_that_was_installed_later_and_calls_the_one_before_is_called_once(
    told, again, of_all, capsys
):
    watch, beneath, called = installed(rank=0), sys.excepthook, []

    def mine(*exception):  # as error reporters do
        called.append(exception[1])
        beneath(*exception)

    sys.excepthook = mine
    if again:
        watch.install()  # as the end of a world does
    error = AgreedError("all ranks know", 0) if of_all else KeyError("a bug")
    with contextlib.nullcontext() if of_all else pytest.raises(AbortedError):
        leave_uncaught(error)
    assert called == told == [error]
    said = (
        "mntrain: error: all ranks know\n" if of_all else "mntrain: rank 0 of 4 on host failed:\n"
    )
    assert capsys.readouterr().err == said
    watch.uninstall()
    assert sys.excepthook is mine
    leave_uncaught(error)
    assert called == told == [error, error]


def test_a_hook_that_was_installed_later_and_reaches_none_before_comes_below(monkeypatch, capsys):
    watch, told = installed(), []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: told.append(error))
    watch.install()  # again, as the end of a world does
    error = KeyError("a bug")
    with pytest.raises(AbortedError):
        leave_uncaught(error)
    assert told == [error]
    assert "rank 1 of 4 on host failed" in capsys.readouterr().err


def test_a_users_hook_that_fails_hides_nothing_and_the_job_ends(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", lambda *exception: 1 / 0)
    installed()
    with pytest.raises(AbortedError):
        leave_uncaught(KeyError("a bug"))
    err = capsys.readouterr().err
    assert "rank 1 of 4 on host failed" in err
    assert "KeyError: 'a bug'" in err


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agreed_error_is_reported_by_rank_0_alone(told, rank, capsys):
    installed(rank)
    leave_uncaught(AgreedError("all ranks know", rank))
    assert len(told) == (rank == 0)
    assert capsys.readouterr().err == ("mntrain: error: all ranks know\n" if rank == 0 else "")


def test_an_exception_of_a_users_thread_is_reported_and_does_not_end_the_job(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(mpi, "abort", codes.append)
    installed()
    for target in (sys.exit, lambda: {}["in a thread"]):
        thread = threading.Thread(target=target, name="logger")
        thread.start()
        thread.join()
    assert codes == []
    err = capsys.readouterr().err
    assert err.count("rank 1 of 4 on host") == err.count("KeyError: 'in a thread'") == 1


def test_an_exit_code_of_one_rank_is_that_of_the_job_and_an_end_without_one_is_no_error(capsys):
    with pytest.raises(AbortedError, match="3"):
        installed().end_job(SystemExit(3))
    said = "mntrain: rank 1 of 4 on host left the job with exit code 3\n"
    assert capsys.readouterr().err == said
    codes = (None, 0, 3, "a reason")
    assert [errors.raised_by_all(SystemExit(code)) for code in codes] == [True, True, False, False]


def test_an_exception_of_an_own_thread_ends_the_job(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(mpi, "abort", codes.append)
    installed()
    thread = threading.Thread(target=lambda: {}["missing"], name="mntrain communication")
    thread.start()
    thread.join()
    assert codes == [1]
    assert "rank 1 of 4 on host failed" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("of_all", [True, False])
def test_what_cpp_made_of_an_error_is_reported_as_that_error(rank, of_all, monkeypatch, capsys):
    """C++ has waited for a future of torch, and raises a RuntimeError with its error's text."""
    told = []
    first = (
        AgreedError("ranks disagree", rank) if of_all else RemoteRankError(2, "b", "E", "m", "t")
    )
    others = {name: lambda *given: told.append(given) for name in ("end_run", "leave")}
    watch = installed(rank, 4)
    watch.others = SimpleNamespace(communication_error=first, **others)
    raised = RuntimeError(
        f"Got the following error when running the callback: Kind: {first}\nAt: x"
    )
    with contextlib.nullcontext() if of_all else pytest.raises(AbortedError):
        leave_uncaught(raised)
    said = "mntrain: error: ranks disagree\n" if of_all and rank == 0 else ""
    assert capsys.readouterr().err == said  # the rank that failed has said it
    watch.others = SimpleNamespace(communication_error=first, tell_failure=told.append, **others)
    with pytest.raises(AbortedError):
        leave_uncaught(RuntimeError("another one"))
    assert "RuntimeError: another one" in capsys.readouterr().err


@pytest.mark.parametrize("ends_communication", [True, False])
@pytest.mark.parametrize(
    ("before", "said"),
    [
        (AgreedError("metrics.log(3): acc is no number", 1), "metrics.log(3): acc is no number\n"),
        (ValueError("of the user's"), "\nValueError: of the user's\n\n"),
    ],
)
def test_what_one_rank_had_raised_is_told_where_ranks_disagree_after_it(
    capsys, ends_communication, before, said
):
    """As where `finally` has a collective, which other ranks do not call."""
    watch = installed()
    error = AgreedError("ranks disagree", 1)
    error.__context__ = before
    others = SimpleNamespace(communication_error=error if ends_communication else None)
    watch.others = others
    leave_uncaught(error)
    told = f"mntrain: error: rank 1 of 4 on host had raised: {said}"
    assert capsys.readouterr().err == told * ends_communication


def test_an_exception_that_ends_a_thread_of_the_users_is_not_kept():
    watch, held = installed(), []

    class Batch:
        pass

    def prefetch():
        batch = Batch()
        held.append(weakref.ref(batch))
        raise KeyError("a bug")

    thread = threading.Thread(target=prefetch)
    thread.start()
    thread.join()
    watch.uninstall()
    del thread
    gc.collect()
    assert held[0]() is None
