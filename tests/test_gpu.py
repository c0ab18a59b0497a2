"""Run the CUDA tests of tests/mpi under mpirun, on ranks that share this machine's GPUs."""

import pytest
import torch
from launch import MPI_TESTS, run_suite

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gpu_suite_passes(ranks):
    result = run_suite(ranks, [MPI_TESTS / "test_cuda.py"], timeout=240)
    if result.returncode != 0:
        pytest.fail(result.report(), pytrace=False)
