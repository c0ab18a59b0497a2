"""Tests of tests/mpi on simulated ranks: a pytest session on each, in a thread."""

import os
import runpy
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _pytest.runner
import pytest
from launch import MPI_TESTS, TESTS
from network import NetworkModel
from processes import Processes
from simulated_worlds import SimulatedWorlds
from virtual_time import current

FILES = {path.stem: path for path in MPI_TESTS.glob("*.py") if path.stem != "conftest"}
FILES["conftest_of_ranks"] = MPI_TESTS / "conftest.py"

# What belongs to a process, or to the session that runs this one.
LEFT_OUT = ("cacheprovider", "faulthandler", "junitxml", "logging", "terminal", "threadexception")
LEFT_OUT += ("unraisableexception", "debugging", "pastebin", "stepwise", "setuponly", "setupplan")


def simulated() -> list[str]:
    """Return the names of the files whose tests are marked for simulated ranks."""
    word = "pytest.mark.simulated"
    found = (name for name, path in FILES.items() if word in path.read_text())
    return sorted(name.removeprefix("test_") for name in found)


class OnRank:
    """A plugin of a rank's session, with the markers and the selection of the usual one."""

    def __init__(self, outer: pytest.Config) -> None:
        self.outer = outer
        self.failures: list[str] = []
        self.outcomes: Counter[str] = Counter()

    def pytest_configure(self, config: pytest.Config) -> None:
        for name in ("markers", "filterwarnings"):
            for line in self.outer.getini(name):
                config.addinivalue_line(name, line)
        fixtures = __import__("conftest_of_ranks")
        for of_all_ranks in ("in_chunks", "frozen_modules"):
            delattr(fixtures, of_all_ranks)
        config.pluginmanager.register(fixtures)

    def pytest_pycollect_makemodule(self, module_path: Path, parent: Any) -> Any:
        return Module.from_parent(parent, path=module_path)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not item.get_closest_marker("processes")]
        for plugin in self.outer.pluginmanager.get_plugins():
            if hasattr(plugin, "keep_few"):
                plugin.keep_few(self.outer, items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.outcomes[report.outcome] += 1
        if (
            report.failed and not current().time.stopping
        ):  # not what follows from the end of the run
            self.failures.append(f"{report.nodeid} ({report.when})\n{report.longreprtext}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append(f"{report.nodeid}\n{report.longreprtext}")

    @pytest.fixture
    def capfd(self, capsys: Any) -> Any:
        """A rank's own output: descriptors are those of all ranks."""
        return capsys


class Module(pytest.Module):
    """A module of tests that is the rank's own."""

    def _getobj(self) -> Any:
        return __import__(self.path.stem)


class RanksOfTests(SimulatedWorlds):
    """Simulated ranks, each with a pytest session."""

    def take_the_place_of_the_host(self, patch: pytest.MonkeyPatch) -> None:
        super().take_the_place_of_the_host(patch)
        common = runpy.run_path(str(FILES["conftest_of_ranks"]))
        common["cut_in_chunks"](patch)
        common["freeze_modules"](patch)
        processes = Processes(self.time, self.size, FILES)
        processes.take_the_place_of_the_host(patch)
        patch.setattr(_pytest.runner, "_update_current_test_var", lambda item, when: None)


def run(nodes: Sequence[int], arguments: Sequence[str], config: pytest.Config) -> Counter[str]:
    """Run tests on nodes of so many ranks; return how many of them end how.

    With SIMULATED_SEED, messages are late and threads change as this seed says, and long messages
    wait for their receives. Raises AssertionError with the failures of all ranks.
    """
    options: dict[str, Any] = {}
    if seed := int(os.environ.get("SIMULATED_SEED", "0")):
        late = NetworkModel(late_s=1e-4, eager_bytes=256)
        options = {"network": late, "switches": 0.1 * (seed % 4)}
    ranks = RanksOfTests(nodes, seed or 1, **options)
    plugins = [OnRank(config) for _ in range(ranks.size)]
    words = ["-x", "--with-mpi", "--assert=plain", "--capture=no"]
    words += ["--noconftest", "--rootdir", str(TESTS.parent), "-c", "/dev/null"]
    words += ["--disable-plugin-autoload", "-p", "pytest_mpi"]
    words += [word for name in LEFT_OUT for word in ("-p", f"no:{name}")]

    def on_rank(comm: Any) -> None:
        rank = comm.Get_rank()
        own = [*words, f"--basetemp={folder}/{rank}", *arguments]
        code, plugin = pytest.main(own, [plugins[rank]]), plugins[rank]
        nothing = code != 0 or not plugin.outcomes["passed"]
        if nothing and not plugin.failures and not ranks.time.stopping:
            plugin.failures.append(f"pytest ends with {code}, and {dict(plugin.outcomes)}")

    end = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks.run_on_mpi(on_rank)
        except Exception as error:
            end = [f"{type(error).__name__}: {error}"]
    failures = [
        f"rank {rank}: {text}" for rank, plugin in enumerate(plugins) for text in plugin.failures
    ]
    if failures or end:
        raise AssertionError("\n\n".join([*failures, *end]))
    return plugins[0].outcomes
