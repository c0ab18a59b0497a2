"""Run the tests of tests/mpi under mpirun, one pytest test for each number of ranks."""

from pathlib import Path

import pytest
from launch import MPI_TESTS, run_suite

# On one rank, the tests whose subject differs there. On one to three ranks together, every test in
# every combination with --all. On four, tests that depend on which rank is on which node; parity
# and wire dtypes also run on emulated nodes of two ranks. Some of them do not run on three.
OF_ONE = ("checkpoint", "collectives", "own_loop", "parity", "shared_memory", "trainer", "world")
OF_NODES = ("exchanges", "levels", "staleness", "state_over_ranks", "transports")
AT_TWO = ("shared_memory", "stage_model", "stage_precision", "stage_updates", "state_over_ranks")
AT_THREE = ("cost", "jobs", "losses", "own_loop", "soak", "stage_cost", "trainer", "transports")
AT_THREE += ("balance", "cadence", "rare_jobs", "staleness", "exchanges")
AT_THREE += ("agreement", "changed_parameters", "full_state", "metrics_over_ranks")
AT_THREE += ("second_optimizer", "sync_batchnorm", "weighted_exchanges", "wire")
# Whose subject is what an optimizer or a loader does with collectives, not how these are made.
_ABOVE = ("balance", "comparison", "compressed_gradients", "data", "default_device", "losses")
_ABOVE += ("checkpoint", "own_loop")
_ABOVE += ("parameter_kinds", "stage_model", "stage_precision", "stage_semantics", "stage_updates")
_ABOVE += ("stages", "state_over_ranks", "exchanges", "cadence")
_ABOVE += ("rank_clipping", "rare_jobs", "staleness", "weighted_exchanges")
_ABOVE += ("agreement", "changed_parameters", "full_state", "metrics_over_ranks")
_ABOVE += ("second_optimizer", "sync_batchnorm")
_ABOVE += ("plan", "report", "timeline", "verification", "weight_checks")
# Or bytes and memory, processes that are forked, devices that are emulated, and long turns.
_ABOVE += ("cost", "forked", "shared_memory", "soak", "stage_cost")
_ABOVE += ("trainer", "transports", "workers")
ABOVE = [MPI_TESTS / f"test_{name}.py" for name in _ABOVE]
# With --all alone: other tests show most of what they do.
RARE = ("default_device", "forked", "parameter_kinds", "plan", "rank_clipping", "rare_jobs")
RARE += ("report", "shared_memory", "soak", "stage_cost", "stage_model", "stage_precision")
RARE += ("timeline", "verification", "weight_checks", "weighted_exchanges", "workers")
RARE += ("cadence", "comparison", "compressed_gradients", "losses", "trainer")
AT_FOUR_ALONE = ("exchanges", "staleness", "state_over_ranks", "transports")
SUITES = {
    1: [MPI_TESTS / f"test_{name}.py" for name in OF_ONE],
    2: [MPI_TESTS, *(f"--ignore={MPI_TESTS}/test_{name}.py" for name in AT_THREE)],
    3: [MPI_TESTS, *(f"--ignore={MPI_TESTS}/test_{name}.py" for name in AT_TWO)],
    4: [MPI_TESTS / f"test_{name}.py" for name in OF_NODES],
    8: [MPI_TESTS / "test_levels.py"],
}


def test_the_suites_name_files_that_exist():
    """Since pytest ignores a file that is missing without a word."""
    words = [str(word).removeprefix("--ignore=") for files in SUITES.values() for word in files]
    assert [path for path in [*words, *map(str, ABOVE)] if not Path(path).exists()] == []


def check(ranks, files, selection=""):
    """Run the files of a suite, and fail with the report of all ranks."""
    result = run_suite(ranks, files, timeout=900, selection=selection)
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
    """The most important of the other tests on three ranks."""
    if request.config.getoption("--all"):
        pytest.skip("the whole suites run instead")
    others = [MPI_TESTS / f"test_{name}.py" for name in (*AT_FOUR_ALONE, *RARE)]
    check(3, [file for file in ABOVE if file not in others])


@pytest.mark.thorough
@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    "ranks",
    [pytest.param(n, marks=pytest.mark.exhaustive) if n != 4 else n for n in SUITES],
)
def test_mpi_suite_passes(ranks, request):
    every_combination = request.config.getoption("--all") and ranks != 4
    check(ranks, SUITES[ranks], "--all" if every_combination else "")
