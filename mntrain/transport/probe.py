"""Runs `child`, and says what became of it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from mntrain.transport.probe_process import SIZES

SECONDS = 60.0
# What launchers tell the ranks that they start: the child is to be a world of its own.
LAUNCHERS = re.compile(
    "PMI|PRTE_|SLURM_|HYDRA|HYDI_|MPI_LOCAL|MV2_|PALS_|ALPS_"
    # Of Open MPI's, what users set begins with OMPI_MCA_; and so do a few of mpirun's own.
    "|OMPI_(?!MCA_)|OMPI_MCA_(orte|ess|pmix|prte|initial_wdir)"
)
CHILD = (sys.executable, "-m", "mntrain.transport.probe_process")


def takes_device_memory(
    device: str, command: Sequence[str] = CHILD, seconds: float = SECONDS
) -> str:
    """Why this rank's MPI is not to be given memory of a device; empty if it may be. Local.

    Takes as long as a start of torch and MPI, some seconds; at most `seconds`.
    """
    try:
        child = subprocess.run(
            [*command, device],
            env=alone(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if late.stdout else ""
        return f"with device memory its MPI hung at {_after(said)}"
    except OSError as error:
        return f"it could not be tried: {error}"
    return verdict(child.returncode, child.stdout, child.stderr)


def verdict(code: int, said: str, complained: str) -> str:
    """What follows from a child's end: its exit code, and what it wrote. Pure."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"with device memory its MPI crashed ({name}) at {_after(said)}"
    if code:
        last = (complained.strip().splitlines() or ["it said nothing"])[-1]
        return f"with device memory its MPI failed at {_after(said)}: {last}"
    wrong = [line.split()[0] for line in said.splitlines() if line.endswith("wrong")]
    if wrong:
        return f"what its MPI sends from device memory arrives wrong, at {', '.join(wrong)} bytes"
    if len(_known(said)) < len(SIZES):
        return "its MPI ended before all was tried"
    return ""


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which MPI starts a world of one. What a user set for MPI stays."""
    return {name: value for name, value in environment.items() if not LAUNCHERS.match(name)}


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What an environment sets that may change how an MPI takes device memory."""
    prefixes = ("OMPI_MCA_", "UCX_", "MPIR_CVAR_", "MPICH_", "FI_", "CUDA_", "NCCL_", "MPI4PY_")
    return {name: environment[name] for name in sorted(environment) if name.startswith(prefixes)}


def _known(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.endswith(("right", "wrong"))]


def _after(said: str) -> str:
    known = len(_known(said))
    return f"{SIZES[known]} bytes" if known < len(SIZES) else "its end"
