"""Starts that cannot work, told before MPI would die of them, and the words of the doctor."""

import json
import os
import subprocess
import sys

import pytest
from job import SMALL
from launch import is_open_mpi

MNTRAIN = [sys.executable, "-m", "mntrain"]

# What the mpirun of the other MPI library passes to each rank.
PRTE = {
    "PMIX_NAMESPACE": "prterun-n1-7@1",
    "PMIX_RANK": "0",
    "PMIX_SERVER_URI41": "prterun-n1-7@0.0;tcp4://127.0.0.1:9",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
}
HYDRA = {"PMI_FD": "9", "PMI_RANK": "0", "PMI_SIZE": "2"}
STRANGE = HYDRA if is_open_mpi() else PRTE


pytestmark = pytest.mark.usefixtures("no_launcher")


def alone(command, **environment):
    return subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.thorough
def test_the_mpirun_of_another_mpi_is_one_sentence_with_the_fix():
    ended = alone([*MNTRAIN, *SMALL], **STRANGE)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("mntrain: this mpirun")
    assert line.endswith(f"Fix: start the job with {os.path.dirname(sys.executable)}/mpirun")


def test_the_doctor_shows_why_mpi_cannot_start():
    ended = alone([*MNTRAIN, "doctor", "--json"], **STRANGE)
    assert ended.returncode == 1
    report = json.loads(ended.stdout)
    assert report["status"] == "fail"
    assert report["checks"][0]["name"] == "start"
    assert "this mpirun passes the ranks by PMI" in report["checks"][0]["text"]
