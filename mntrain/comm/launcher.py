"""Checks of the launcher's environment against the world that MPI sees."""

from collections.abc import Mapping

# The most specific launcher first: mpirun within a Slurm job states how many ranks it started.
SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
)


class SilentSingletonsError(RuntimeError):
    """The launcher started more ranks than MPI sees: each rank would be a world of its own."""


def check_launcher(environment: Mapping[str, str], size: int) -> None:
    """Compare the size of the world with the launcher's environment. Local.

    Raises SilentSingletonsError if the launcher started more ranks. PMIx states no size, but a rank
    number beyond this world reveals the mismatch.
    """
    for variable in SIZE_VARIABLES:
        value = environment.get(variable, "")
        if value.isdigit():
            expected = int(value)
            if expected > size:
                raise SilentSingletonsError(_message(f"{variable}={value}", expected, size))
            return
    pmix_rank = environment.get("PMIX_RANK", "")
    if pmix_rank.isdigit() and int(pmix_rank) >= size:
        evidence = f"PMIX_RANK={pmix_rank}"
        raise SilentSingletonsError(_message(evidence, int(pmix_rank) + 1, size))


def _message(evidence: str, expected: int, size: int) -> str:
    return (
        f"the launcher started {expected} ranks ({evidence}), but MPI sees a world of {size}: the "
        "launcher and this Python's MPI library do not know each other, so every rank would train "
        "alone. Use the mpirun of the same MPI (with a pip wheel: the one next to this python), or "
        "under Slurm the matching plugin: srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH. To "
        f"run one rank on purpose, unset {evidence.partition('=')[0]}"
    )
