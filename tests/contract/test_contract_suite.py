"""Run the scripts under mpirun, once with DDP and once here in the same processes."""

from pathlib import Path

import pytest
from launch import run_suite

RANKS = Path(__file__).parent / "ranks"
SUITES = {  # the number of ranks, and options of pytest
    # Every script that is not thorough, at two of the three stages.
    "quick": (2, []),
    "alone": (1, []),
    # Of four ranks, some have no sample of a batch, or no gradient of a layer.
    "unequal": (4, ["--all", "-k", "unequal or token_means or another_part"]),
    # The pairs of script and stage that the quick set leaves out.
    "rest": (3, ["--all", "-m", "thorough"]),
    "all": (3, ["--all"]),
}
MARKS = {"quick": []}


@pytest.mark.timeout(660)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, [pytest.mark.exhaustive])) for name in SUITES],
)
def test_scripts_train_as_under_ddp(request, name):
    if request.config.getoption("--all") and name in ("quick", "rest"):
        pytest.skip("all scripts run on three ranks instead")
    ranks, options = SUITES[name]
    result = run_suite(ranks, [RANKS, *options], timeout=600, test_timeout=240)
    if result.returncode != 0:
        pytest.fail(result.report(), pytrace=False)
