"""Run tests of tests/mpi by hand, with pytest's arguments, here on nodes of two and one ranks:

python tests/simulation/simulate.py 2,1 tests/mpi/test_levels.py -k verb
"""

import sys
from pathlib import Path
from typing import Any

import pytest


class InPlaceOfTests:
    """A plugin that runs tests on simulated ranks where a session would run its own."""

    def __init__(self, nodes: list[int], arguments: list[str]) -> None:
        self.nodes, self.arguments = nodes, arguments

    def pytest_runtestloop(self, session: Any) -> bool:
        import sessions  # pytest has added the folders of tests to the path

        try:
            print(dict(sessions.run(self.nodes, self.arguments, session.config)))
        except AssertionError as error:
            pytest.exit(str(error), returncode=1)
        return True


if __name__ == "__main__":
    nodes, *arguments = sys.argv[1:]
    words = ["-n", "0", "-q", "--no-header", "--no-summary", "--timeout", "0"]
    words.append(str(Path(__file__).with_name("test_ranks.py")))
    sys.exit(pytest.main(words, [InPlaceOfTests([*map(int, nodes.split(","))], arguments)]))
