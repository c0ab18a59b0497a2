"""Run the tests of `ranks` under mpirun, on ranks that share this machine's GPUs."""

from pathlib import Path

import pytest
from launch import run_suite

from gpu.place import gpu

pytestmark = gpu

RANKS = Path(__file__).parent / "ranks"


@pytest.mark.timeout(630)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gpu_suite_passes(ranks):
    result = run_suite(ranks, [RANKS], timeout=600, test_timeout=250, selection="--all")
    if result.returncode != 0:
        pytest.fail(result.report(), pytrace=False)
