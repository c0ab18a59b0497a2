"""The selection of tests by their marks and parameters; those of tests/mpi run on ranks only.

Of a parametrized test, as few cases as show every value of every parameter at least once. Tests
marked `thorough` run with --thorough, and those marked `exhaustive` with --all, which runs every
combination of parameters, and gives tests of hypothesis more examples. The suites that mpirun runs
have tests with either mark with --all alone. Without paths on the command line, pytest runs those
of pyproject.toml: unit tests, simulated ranks, and those of tests/mpi on three ranks. With --more,
these quick tests are left out.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest
import rank_reports
import torch
from launch import FOLDER, with_site

# A busy machine is slow, not wrong: no example has a deadline.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.register_profile("all", deadline=None)

MPI_TESTS = Path(__file__).parent / "mpi"
CLUSTER_TESTS = Path(__file__).parent / "cluster"
# Mostly of real time that passes: these run first, beside whatever else computes.
WAITING = [Path(__file__).parent / "unit" / name for name in ("launch", "run", "watchdog")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every test in every combination")
    parser.addoption("--thorough", action="store_true", help="also run tests marked thorough")
    parser.addoption("--more", action="store_true", help="as --thorough, without the quick tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--with-mpi"):
        config.pluginmanager.register(rank_reports)
    else:  # tensors are small, and others use the cores, too; launched jobs choose anew
        torch.set_num_threads(1)
        os.environ["PYTHONPATH"] = with_site(os.environ.get("PYTHONPATH", ""))
    hypothesis.settings.load_profile("all" if config.getoption("--all") else "quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep few cases of each selected test, but every case of one named on the command line."""
    for item in items:
        if item.path.is_relative_to(CLUSTER_TESTS):  # one set of emulated nodes at a time
            item.add_marker(pytest.mark.xdist_group("cluster"))
    if config.getoption("--more"):
        config.option.thorough = True
        quick = {item for item in items if is_quick(config, item)}
        config.hook.pytest_deselected(items=[*quick])
        items[:] = [item for item in items if item not in quick]
    if not any("::" in argument for argument in config.args):
        keep_few(config, items)
    items.sort(key=lambda item: not any(map(item.path.is_relative_to, WAITING)))


def is_quick(config: pytest.Config, item: pytest.Item) -> bool:
    """Return whether pytest runs a test without any option."""
    folders = [config.rootpath / path for path in config.getini("testpaths")]
    usual = any(item.path.is_relative_to(folder) for folder in folders)
    return usual and item.get_closest_marker("thorough") is None


def pytest_collection_finish() -> None:
    """Leave out of garbage collections what modules and tests hold: a quarter of a second each."""
    gc.collect()
    gc.freeze()


def keep_few(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases, unless all of them are to run."""
    if config.getoption("--all"):
        return
    left_out = {"exhaustive"} if config.getoption("--thorough") else {"thorough", "exhaustive"}
    by_function: dict[object, list[pytest.Item]] = {}
    for item in items:
        marks = {marker.name for marker in item.iter_markers()}
        if not left_out & marks:
            # Cases that need a GPU stand for no others: they may be skipped.
            key = item.nodeid.partition("[")[0], "gpu" in marks
            by_function.setdefault(key, []).append(item)
    kept = {item for cases in by_function.values() for item in covering(cases)}
    for item in items:
        if item not in kept:
            item.config.hook.pytest_deselected(items=[item])
    items[:] = [item for item in items if item in kept]


def covering(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return few cases of one test that together have every value of every parameter."""
    values = {case: parameter_values(case) for case in cases}
    missing, chosen = set().union(*values.values()), []
    while missing:
        best = max(cases, key=lambda case: len(values[case] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen


def parameter_values(case: pytest.Item) -> set[tuple[str, str]]:
    """Return (parameter, value) pairs; a value whose text is an address goes by its identity."""
    callspec = getattr(case, "callspec", None)
    if callspec is None:
        return {("", "")}
    return {
        (name, str(id(value)) if " at 0x" in repr(value) else repr(value))
        for name, value in callspec.params.items()
    } | {("", "")}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    serial = not config.getoption("--with-mpi")
    for_ranks = collection_path.is_relative_to(MPI_TESTS) or collection_path.name == "ranks"
    # None leaves the decision to pytest's other rules.
    return True if serial and for_ranks else None


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no variable of a launcher: tests of single processes run the same in a job."""
    for name in [*os.environ]:
        if name == "RANK" or name.startswith(("PMI", "OMPI_COMM", "SLURM")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Launched processes inherit it; a rank that was launched has the launch's folder."""
    launched = os.environ.get(FOLDER)
    folder = Path(launched) / "cache" if launched else tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # torch's own may hold what a kill has cut
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield
