"""Keep the tests of `ranks` for ranks: test_contract_suite.py launches them under mpirun."""

from pathlib import Path

RANKS = Path(__file__).parent / "ranks"


def pytest_ignore_collect(collection_path, config):
    serial = not config.getoption("--with-mpi")
    # None leaves the decision to pytest's other rules.
    return True if serial and collection_path.is_relative_to(RANKS) else None
