"""Run the scripts under mpirun, once with DDP and once here in the same processes."""

from pathlib import Path

import pytest
from launch import run_suite

RANKS = Path(__file__).parent / "ranks"


def check(ranks, *arguments, everything):
    options = {"timeout": 600, "test_timeout": 240, "everything": everything}
    result = run_suite(ranks, [RANKS, *arguments], **options)
    if result.returncode != 0:
        pytest.fail(result.report(), pytrace=False)


@pytest.mark.timeout(660)
def test_scripts_train_as_under_ddp(request):
    """On two ranks, every script that is not thorough, at two of the three stages."""
    if request.config.getoption("--all"):
        pytest.skip("all scripts run on three ranks instead")
    check(2, everything=False)


@pytest.mark.exhaustive
@pytest.mark.timeout(660)
def test_scripts_train_on_one_rank():
    check(1, everything=False)


@pytest.mark.thorough
@pytest.mark.timeout(660)
def test_scripts_whose_ranks_differ_train_on_four():
    """Of four ranks, some have no sample of a batch, or no gradient of a layer."""
    check(4, "-k", "unequal or token_means or another_part", everything=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(660)
def test_scripts_train_as_under_ddp_at_the_stages_that_are_left_out_on_two_ranks(request):
    """On three ranks, the pairs of script and stage that are marked thorough."""
    if request.config.getoption("--all") and not request.config.getoption("--rest"):
        pytest.skip("all scripts run on three ranks instead")
    check(3, "-m", "thorough", everything=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(660)
def test_all_scripts_train_as_under_ddp():
    """On three ranks, at every stage."""
    check(3, everything=True)
