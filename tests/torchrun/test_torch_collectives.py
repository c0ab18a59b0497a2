"""The ZeRO optimizer over process groups of torch, under torchrun: as over MPI, without MPI."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zero

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
HELPERS = os.pathsep.join([str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "mpi")])
ENVIRONMENT = {"PYTHONPATH": HELPERS, "OMP_NUM_THREADS": "1"}


def torchrun(ranks, *words):
    torch_run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*torch_run, "--nproc-per-node", str(ranks), *words],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, **ENVIRONMENT},
    )


def passed(done, ranks):
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert len(re.findall(r"^rank \d: \d+ tests passed$", done.stdout, re.MULTILINE)) == ranks, (
        output
    )


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_collective_has_its_result(ranks):
    passed(torchrun(ranks, SCRIPTS / "collectives.py"), ranks)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_training_equals_ddp(ranks):
    passed(torchrun(ranks, SCRIPTS / "zero_training.py"), ranks)


def test_without_a_process_group_there_are_none():
    with pytest.raises(ValueError, match="call init_process_group"):
        zero.TorchCollectives()


@pytest.mark.exhaustive
def test_the_example_learns():
    done = torchrun(2, ROOT / "examples" / "torchrun.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"accuracy (0\.9|1\.0)\d* on 2 ranks", done.stdout), done.stdout
