"""Variables of launchers, against the MPI library and the world that it sees."""

import re
from pathlib import Path

import pytest

from mntrain.checks.launcher import (
    SIZE_VARIABLES,
    local_size,
    protocol,
    world_size,
)

# What Slurm 22.05 sets in an allocation of 4 tasks.
ALLOCATION = {"SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_TASKS_PER_NODE": "4"}
BATCH_SHELL = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
INTERACTIVE_STEP = {**BATCH_SHELL, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
STEP = {**BATCH_SHELL, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("environment", "size", "status", "words"),
    [
        ({"HOME": "/"}, 1, "pass", ""),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4, "pass", ""),
        ({"SLURM_STEP_NUM_TASKS": "1"}, 4, "pass", ""),  # srun -n 1, then mpirun
        ({"SLURM_STEP_NUM_TASKS": ""}, 1, "pass", ""),  # of no number it is not known
        ({"SLURM_STEP_NUM_TASKS": "4(x2)"}, 1, "pass", ""),
        # The launcher within a job knows better than the job.
        ({"PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "8"}, 2, "pass", ""),
        ({"PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "8"}, 1, "fail", "started 2 ranks .PMI_SIZE=2"),
        # PMIx states no size, but a rank.
        ({"PMIX_RANK": "3"}, 1, "fail", "started 4 ranks .PMIX_RANK=3.* unset PMIX"),
        ({"PMIX_RANK": "3"}, 4, "pass", ""),
        ({"PMIX_RANK": "0"}, 1, "pass", ""),
        ({"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "3"}, 1, "pass", ""),
        # A plain python in the shell of an allocation, and one rank that is on purpose.
        (ALLOCATION, 1, "warn", "one process in a Slurm allocation of 4 tasks"),
        (BATCH_SHELL, 1, "warn", "one process in a Slurm allocation of 4 tasks"),
        (INTERACTIVE_STEP, 1, "warn", "one process in a Slurm allocation of 4 tasks"),
        ({**BATCH_SHELL, "PMI_SIZE": "1"}, 1, "pass", ""),
        ({**BATCH_SHELL, "OMPI_COMM_WORLD_SIZE": "1"}, 1, "pass", ""),
        (STEP, 4, "pass", ""),
        *(
            (
                {name: "4"},
                1,
                "fail",
                rf"started 4 ranks \({name}=4\), but MPI sees a world of 1.*use the mpirun of the "
                rf"same MPI.*srun --mpi=pmix.* unset {name}",
            )
            for name in SIZE_VARIABLES
        ),
    ],
)
def test_the_size_of_the_world_is_compared_with_the_launchers(environment, size, status, words):
    found = world_size(environment, size)
    assert found.status == status
    assert re.search(words, str(found))


# The protocols, before MPI starts. The variables are those that mpirun of MPICH 5.0.2 and Open MPI
# 5.0.11 and srun of Slurm 22.05 were seen to set.

MPICH = (
    "MPICH Version:      5.0.2\nMPICH Device:       ch4:ucx ofi\n"
    "MPICH configure:    --with-device=ch4:ucx,ofi --with-pm=hydra:gforker\nMPICH CC:    cc\n"
)
MPICH_WITH_PMIX = MPICH.replace("--with-pm=hydra:gforker", "--with-pmix=/usr")
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)\n"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"

HYDRA = {"PMI_FD": "9", "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
PRTE = {"PMIX_NAMESPACE": "prterun-n1-7@1", "PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
SRUN_PMIX = {**SRUN, "SLURM_MPI_TYPE": "pmix", "PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_RANK": "1"}
SRUN_PMI2 = {**SRUN, "SLURM_MPI_TYPE": "pmi2", "PMI_FD": "12", "PMI_SIZE": "2", "PMI_RANK": "1"}
NOWHERE = Path("/nowhere")


@pytest.mark.parametrize(
    ("environment", "library", "words"),
    [
        ({}, MPICH, ""),
        ({}, OPEN_MPI, ""),
        (HYDRA, MPICH, ""),
        (PRTE, OPEN_MPI, ""),
        (SRUN_PMI2, MPICH, ""),
        (SRUN_PMIX, OPEN_MPI, ""),
        (SRUN_PMIX, MPICH_WITH_PMIX, ""),
        (SRUN_PMIX, CRAY, ""),
        ({**SRUN_PMIX, **HYDRA}, MPICH, ""),  # mpirun within a step
        ({**HYDRA, **PRTE}, OPEN_MPI, ""),
        ({**HYDRA, "PMI_SIZE": "1"}, OPEN_MPI, ""),  # one rank alone is what was asked for
        (SRUN_PMIX, MPICH, "srun --mpi=pmix passes the ranks by PMIx.*(MPICH).*srun --mpi=pmi2"),
        (SRUN_PMI2, OPEN_MPI.replace("v5.0.11", "v4.1.6"), ""),  # which may speak PMI-2
        (SRUN_PMI2, OPEN_MPI, "srun --mpi=pmi2 passes the ranks by PMI,.*srun --mpi=pmix"),
        (PRTE, MPICH, "this mpirun passes the ranks by PMIx.*with the mpirun of MPICH"),
        (HYDRA, OPEN_MPI, "this mpirun passes the ranks by PMI,.*with the mpirun of Open MPI"),
        ({**SRUN_PMIX, **PRTE}, MPICH, "this mpirun passes"),
    ],
)
def test_a_library_that_does_not_know_the_launchers_protocol_is_refused(
    environment, library, words, tmp_path
):
    found = protocol(environment, library, NOWHERE)
    assert found.status == ("fail" if words else "pass")
    assert re.search(words, str(found))
    (tmp_path / "mpirun").touch()  # the one beside Python is the fix
    assert str(tmp_path / "mpirun") in protocol(PRTE, MPICH, tmp_path).fix


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        (HYDRA, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({**SRUN, "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "3,1"}, 1),
        ({**SRUN, "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "1,4(x2)"}, 4),
        ({**SRUN, "SLURM_NODEID": "9", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 1),
        ({**SRUN, "SLURM_NODEID": "0"}, 1),
    ],
)
def test_launchers_state_the_ranks_of_this_host(environment, ranks):
    assert local_size(environment) == ranks
