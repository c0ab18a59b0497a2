"""Reports of every rank of a test session when a test fails or hangs.

A rank that fails leaves the others waiting in a collective call. So it prints its failure at once,
gives the others a few seconds to print theirs, and ends the job: a rank that exits with an error
and without MPI_Finalize makes mpirun end all the others.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
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
    config.pluginmanager.register(FailureReports(config))


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
