"""Run the tests of tests/mpi under mpirun, one pytest test for each number of ranks."""

import re
from pathlib import Path

import pytest
from launch import MPI_TESTS, run_suite

# tests/simulation/test_ranks.py runs the others; ranks need not import files that have no more.
SIMULATED = [
    path
    for path in sorted(MPI_TESTS.glob("test_*.py"))
    if "pytest.mark.simulated" in (text := path.read_text())
    and not {"mark.both", "mark.processes"} & {*re.findall(r"\bmark\.\w+", text)}
]
UNDER_MPI = ("-m", "not simulated or both or processes")
UNDER_MPI += tuple(f"--ignore={path}" for path in SIMULATED)
# On two and three ranks together, every test in every combination with --all. On four, tests that
# depend on which rank is on which node. One rank alone is the subject of tests/unit.
OF_NODES = ("levels", "transports")
AT_TWO = ("shared_memory",)
AT_THREE = ("balance", "jobs", "transports")
# Whose subject is what an optimizer or a loader does with collectives, not how these are made; or
# memory, processes that are forked, devices that are emulated, and long turns.
_ABOVE = ("balance", "checkpoint", "compressed_gradients", "forked")
_ABOVE += ("local_checkpoints", "own_loop", "report")
_ABOVE += ("shared_memory", "timeline", "transports", "verification")
ABOVE = [MPI_TESTS / f"test_{name}.py" for name in _ABOVE]
# With --all alone: other tests show most of what they do.
RARE = ("forked", "report", "shared_memory", "timeline", "verification")
AT_FOUR_ALONE = ("transports",)
SUITES = {
    2: [MPI_TESTS, *(f"--ignore={MPI_TESTS}/test_{name}.py" for name in AT_THREE)],
    3: [MPI_TESTS, *(f"--ignore={MPI_TESTS}/test_{name}.py" for name in AT_TWO)],
    4: [MPI_TESTS / f"test_{name}.py" for name in OF_NODES],
}


def test_the_suites_name_files_that_exist():
    """Since pytest ignores a file that is missing without a word."""
    words = [str(word).removeprefix("--ignore=") for files in SUITES.values() for word in files]
    assert [path for path in [*words, *map(str, ABOVE)] if not Path(path).exists()] == []


def check(ranks, files, selection=""):
    """Run the files of a suite, and fail with the report of all ranks."""
    result = run_suite(ranks, [*files, *UNDER_MPI], timeout=900, selection=selection)
    if result.returncode != 0:
        pytest.fail(result.report(), pytrace=False)


@pytest.mark.timeout(960)
def test_quick_mpi_suite_passes(request):
    """Tests of collectives, worlds and jobs on three ranks."""
    if request.config.getoption("--all"):
        pytest.skip("the whole suites run instead")
    check(3, [MPI_TESTS, *(f"--ignore={file}" for file in ABOVE)])


@pytest.mark.thorough
@pytest.mark.timeout(960)
def test_mpi_suite_above_the_collectives_passes(request):
    """The most important of the other tests on two ranks."""
    if request.config.getoption("--all"):
        pytest.skip("the whole suites run instead")
    others = [MPI_TESTS / f"test_{name}.py" for name in (*AT_FOUR_ALONE, *RARE)]
    check(2, [file for file in ABOVE if file not in others])


@pytest.mark.thorough
@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    "ranks",
    [pytest.param(n, marks=pytest.mark.exhaustive) if n != 4 else n for n in SUITES],
)
def test_mpi_suite_passes(ranks, request):
    every_combination = request.config.getoption("--all") and ranks != 4
    check(ranks, SUITES[ranks], "--all" if every_combination else "")
