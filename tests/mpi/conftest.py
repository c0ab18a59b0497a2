"""What every rank of a test session does when a test fails or hangs.

A rank that fails leaves the others waiting in a collective call. So it prints its failure at once,
gives the others a few seconds to print theirs, and ends the job: a rank that exits with an error
and without MPI_Finalize makes mpirun end all the others.
"""

import faulthandler
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

GRACE = 5.0  # seconds that the other ranks have to report as well


class FailureReports:
    """Print each failure when it happens, and end the job soon after the first."""

    def __init__(self, config: pytest.Config) -> None:
        from mpi4py import MPI

        self.config = config
        self.comm = MPI.COMM_WORLD.Dup()
        self.failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.on_report(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.on_report(report)

    def on_report(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.failed:
            return
        writer = self.config.get_terminal_writer()
        writer.line()
        writer.sep("_", f"{report.nodeid} ({report.when})")
        report.toterminal(writer)
        for title, text in report.sections:
            writer.sep("-", title)
            writer.line(text)
        writer.flush()
        if not self.failed:
            self.failed = True
            start_timer(GRACE, exit_with_error)  # whatever the teardown waits for

    def pytest_unconfigure(self) -> None:
        """Wait until every rank is here; a rank that has failed waits no longer than its timer."""
        arrived = self.comm.Ibarrier()
        while not arrived.Test():
            time.sleep(0.01)
        if self.failed:
            exit_with_error()
        self.comm.Free()


def start_timer(seconds: float, function: Callable[..., None], *args: Any) -> threading.Timer:
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()
    return timer


def exit_with_error() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--with-mpi"):
        reports = FailureReports(config)
        config.pluginmanager.register(reports)
        # Ranks that tidy one folder for temporary files get into each other's way.
        if folder := os.environ.get("MPI_LAUNCH_FOLDER"):
            own = os.path.join(folder, f"temporary of rank {reports.comm.rank}")
            os.makedirs(own, exist_ok=True)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run last what keeps the memory of pending collectives, which tests of memory would find.

    A world that was abandoned, or whose ranks disagreed, keeps it for the life of its process.
    """
    items.sort(key=lambda item: item.path.stem in ("test_abandon", "test_disagreement"))


def pytest_timeout_set_timer(item: Any, settings: Any) -> bool:
    """Take the place of pytest-timeout's own timers.

    Its signal does not interrupt a blocking MPI call, and its thread ends the rank at once: then
    mpirun ends the other ranks before they say where they are.
    """
    timer = start_timer(settings.timeout, give_up, item, settings.timeout)
    item.cancel_timeout = timer.cancel  # pytest-timeout calls it when the test is over
    return True


def give_up(item: pytest.Item, limit: float) -> None:
    """Print what the test printed and the stack of every thread, then end the job."""
    capture = item.config.pluginmanager.get_plugin("capturemanager")
    capture.suspend_global_capture()
    out, err = capture.read_global_capture()
    print(f"\n{item.nodeid} ran past its limit of {limit:g} s", out, err, sep="\n", flush=True)
    faulthandler.dump_traceback(file=sys.__stdout__, all_threads=True)
    time.sleep(GRACE)
    exit_with_error()


@pytest.fixture(scope="session", autouse=True)
def in_chunks() -> Iterator[None]:
    """Cut small tensors into chunks, progressed by the engine's thread, as large ones are.

    test_small_messages.py and some of test_collectives.py test the other ways.
    """
    if "torch" not in sys.modules:  # no test uses collectives, and the import takes seconds
        yield
        return
    from mntrain.comm import collectives

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "SMALL_MESSAGE_BYTES", 0)
        patch.setattr(collectives, "NO_WAKE_BYTES", 0)
        yield


@pytest.fixture(scope="module")
def ways():
    from cases import Ways  # it imports MPI, which the collecting session has no use for

    cache = Ways()
    yield cache
    cache.close()


# For tests of training; a module of other worlds has a fixture of the same name of its own.


@pytest.fixture(scope="module")
def worlds():
    from oracle import keep_worlds  # it imports MPI, which the collecting session has no use for

    yield from keep_worlds()


@pytest.fixture
def world(worlds):
    return worlds()


@pytest.fixture
def make(world):
    from oracle import make_optimizers

    yield from make_optimizers(world)


@pytest.fixture
def pair(world, make):
    """Make a `Pair` of a model, in the world of the test or a given one."""
    from models import net
    from oracle import ADAMW, Pair

    def pair_of(model=None, kind=ADAMW, *, world=world, **options):
        in_world = functools.partial(make, world=world)
        return Pair(world, in_world, net() if model is None else model, kind, **options)

    return pair_of


@pytest.fixture
def rig() -> Iterator[Callable[..., Any]]:
    """Make a `Rig` of ranks with emulated devices, of which it closes all."""
    from devices import PromptDevice  # it imports MPI
    from mpi4py import MPI
    from rig import Rig

    made: list[Any] = []

    def make(ranks_per_node: int = 2, device: Any = None) -> Any:
        made.append(Rig(ranks_per_node, device or PromptDevice(MPI.COMM_WORLD.rank)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """The same new folder on all ranks."""
    from worlds import shared_folder  # it imports MPI

    with shared_folder() as path:
        yield path
