"""The tests that await a GPU hold on the CPU, as far as they can, so that they do not rot."""

from pathlib import Path

import pytest
from launch import run_suite

TESTS = Path(__file__).parents[1] / "gpu" / "ranks"


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_what_the_gpu_tests_ask_of_a_gpu_holds_on_the_cpu(monkeypatch):
    monkeypatch.setenv("GPU_TESTS_ON", "cpu")
    result = run_suite(2, [TESTS], timeout=280)
    if result.returncode != 0:
        pytest.fail(result.report(), pytrace=False)
