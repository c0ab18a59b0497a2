"""Checks of the launcher against the MPI library, from the environment of one rank. Pure.

Launchers tell each process its rank in variables of a protocol, by which MPI finds the other ranks:
PMI (Hydra, the mpirun of MPICH; srun --mpi=pmi2) or PMIx (the mpirun of Open MPI; srun --mpi=pmix).
A library that does not know the protocol ends in MPI_Init, or makes each rank a world of its own.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from mntrain.checks.finding import Finding, passed

# Variables with the number of ranks that were started, the most specific launcher first: mpirun
# within a Slurm job states how many it started itself. SLURM_NTASKS is the size of an allocation,
# also in the shell of salloc or sbatch, in which a plain `python` is one process.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
# Variables with the rank. Slurm's is last: mpirun in a job inherits it.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
LOCAL_RANK_VARIABLES = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
LOCAL_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")


def first_number(environment: Mapping[str, str], variables: tuple[str, ...]) -> int | None:
    """Return the value of the first of some variables that is a number, or None."""
    values = (environment.get(name, "") for name in variables)
    return next((int(value) for value in values if value.isdigit()), None)


def local_size(environment: Mapping[str, str]) -> int:
    """Return the number of ranks that the launcher started on this host; 1 if it does not say."""
    given = first_number(environment, LOCAL_SIZE_VARIABLES)
    if given is not None:
        return given
    counts = expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = first_number(environment, ("SLURM_NODEID",))
    return counts[node] if node is not None and node < len(counts) else 1


def expand_counts(text: str) -> list[int]:
    """Return the numbers in a text such as 4(x2),3: of Slurm's tasks by node."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(count)] * int(times or 1)
    return found


def protocol(environment: Mapping[str, str], library: str, bin_dir: Path) -> Finding:
    """Compare the launcher's protocol with those of the MPI library. Before MPI starts.

    `library` is the full version string of the library, and `bin_dir` is the folder of the running
    Python, whose mpirun belongs to a library that pip installed.
    """
    speaks_pmix = "PMIX_NAMESPACE" in environment
    speaks_pmi = "PMI_FD" in environment or "PMI_PORT" in environment
    mpich = library.startswith("MPICH")
    several = (first_number(environment, SIZE_VARIABLES) or 1) > 1
    if mpich and speaks_pmix and not speaks_pmi and _knows_pmix(library) is False:
        theirs, end = "PMIx", "it would end in MPI_Init"
    elif _is_open_mpi_5(library) and speaks_pmi and not speaks_pmix and several:
        theirs, end = "PMI", "every rank would train alone"
    else:
        return passed("the launcher and the MPI library know each other")
    name = "MPICH" if mpich else "Open MPI"
    in_step = "SLURM_STEP_ID" in environment and "SLURM_MPI_TYPE" in environment
    mpirun = bin_dir / "mpirun"
    if in_step and "OMPI_COMM_WORLD_SIZE" not in environment:
        starter = f"srun --mpi={environment['SLURM_MPI_TYPE']}"
        fix = f"srun --mpi={srun_plugin(library)}"
    else:
        starter = "this mpirun"
        fix = str(mpirun) if mpirun.exists() else f"the mpirun of {name}"
    return Finding(
        "fail",
        f"{starter} passes the ranks by {theirs}, which this Python's MPI library ({name}) does "
        f"not know: {end}",
        f"start the job with {fix}",
    )


def _is_open_mpi_5(library: str) -> bool:
    """Return whether a library is Open MPI 5 or newer, which knows PMIx alone."""
    version = re.match(r"Open MPI v(\d+)", library)
    return version is not None and int(version[1]) >= 5


def _knows_pmix(library: str) -> bool | None:
    """Return whether a build of MPICH knows PMIx; None if its version string does not say.

    Vendors' builds do not list their options.
    """
    options = re.search(r"MPICH configure:(.*)", library)
    return None if options is None else bool(re.search(r"--with-(pmi=)?pmix", options[1]))


def srun_plugin(library: str) -> str:
    """Return the value of srun's --mpi for the MPI library with this version string.

    Raises ValueError for a library of which it is not known.
    """
    if library.startswith("Open MPI"):
        return "pmix"
    if "CRAY MPICH" in library:
        return "cray_shasta"
    if library.startswith("MPICH"):  # pip's wheel knows PMI-1 alone
        return "pmix" if _knows_pmix(library) else "pmi2"
    if library.startswith(("Intel(R) MPI", "MVAPICH")):
        return "pmi2"
    raise ValueError(f"MPI library not known: {library}")


def world_size(environment: Mapping[str, str], size: int) -> Finding:
    """Compare the size of the world with the launcher's environment.

    PMIx states no size, but a rank number beyond this world reveals the mismatch.
    """
    names = (*SIZE_VARIABLES, "PMIX_RANK")
    variable = next((name for name in names if environment.get(name, "").isdigit()), "")
    value = int(environment[variable]) if variable else 1
    started = value + (variable == "PMIX_RANK")
    if started > size:
        return Finding(
            "fail",
            f"the launcher started {started} ranks ({variable}={value}), but MPI sees a world of "
            f"{size}: the launcher and this Python's MPI library do not know each other, so every "
            "rank would train alone",
            "use the mpirun of the same MPI (with a pip wheel: the one next to this python), or "
            "under Slurm the matching plugin: srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH. "
            f"To run one rank on purpose, unset {variable}",
        )
    tasks = first_number(environment, ("SLURM_NTASKS",)) or 1
    if size == 1 < tasks and variable not in SIZE_VARIABLES[:2]:
        return Finding(
            "warn",
            f"this is one process in a Slurm allocation of {tasks} tasks: the others stay unused",
            f"start python with srun or mpirun -n {tasks} to use all; one process is right for a "
            "notebook or a trial",
        )
    return passed(f"{size} rank{'s' * (size > 1)}, as many as the launcher started")
