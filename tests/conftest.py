"""Keep the tests of tests/mpi for ranks: test_mpi_suite.py launches them under mpirun.

And keep what jobs leave for the next ones out of the user's own cache.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from launch import FOLDER

# A busy machine is slow, not wrong.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

MPI_TESTS = Path(__file__).parent / "mpi"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    serial = not config.getoption("--with-mpi")
    # None leaves the decision to pytest's other rules.
    return True if serial and collection_path.is_relative_to(MPI_TESTS) else None


@pytest.fixture(scope="session", autouse=True)
def cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Launched processes inherit it; a rank that was launched has the launch's folder."""
    launched = os.environ.get(FOLDER)
    folder = Path(launched) / "cache" if launched else tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield
