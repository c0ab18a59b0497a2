"""Tests of tests/mpi that are marked `simulated`, on simulated ranks, one test for each file.

Of these files, mpirun runs the tests that are also marked `both` or `processes`.
"""

import pytest
import sessions

# Quick tests, on three ranks; others show collectives under mpirun and in random programs.
QUICK = ("disagreement", "world")
# With --all alone: other tests show most of what they do.
RARE = ("cadence", "default_device")
RARE += ("parameter_kinds", "plan", "rank_clipping", "rare_jobs", "stage_model")
RARE += ("staleness", "stage_precision", "trainer", "weight_checks", "weighted_exchanges")
# What depends on which rank is on which node, of which tests make their own: nodes of two ranks
# each are the least in which lanes are not the ways of leaders.
ON_NODES = ("cost", "exchanges", "levels", "stage_cost", "staleness")
ON_NODES += ("weighted_exchanges", "wire")


def suites():
    for name in sessions.simulated():
        least = [pytest.mark.exhaustive] if name in RARE else [pytest.mark.thorough]
        usual = [4] if name in ON_NODES else [3]
        marks = {tuple(usual): [] if name in QUICK else least}
        if name == "levels":
            marks[8,] = [pytest.mark.exhaustive]
        for nodes, own in marks.items():
            title = f"{name} on {'+'.join(map(str, nodes))}"
            yield pytest.param((name, nodes), marks=own, id=title)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", list(suites()))
def test_file_passes(suite, request):
    name, nodes = suite
    sessions.run(nodes, [str(sessions.FILES[f"test_{name}"])], request.config)


def test_the_lists_name_files_that_are_simulated():
    named = {*QUICK, *RARE, *ON_NODES}
    assert named <= set(sessions.simulated())
