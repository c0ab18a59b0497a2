"""Parts that the rank scripts share: gloo, versions, and the report."""

import json
import platform
import socket
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

MARK = "RESULT "  # the launching script searches the output for this
PACKAGES = ("mntrain", "torch", "mpi4py", "numpy")


class AbsentError(Exception):
    """A peer is not available; the message says why."""


def start_gloo(comm: MPI.Intracomm) -> None:
    """Initialize torch.distributed with a gloo group of the same ranks, over the same link.

    Collective.
    """
    address = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            host = socket.gethostbyname(socket.gethostname())
            address = f"tcp://{host}:{free.getsockname()[1]}"
    dist.init_process_group("gloo", comm.bcast(address), rank=comm.rank, world_size=comm.size)


def stop_gloo(comm: MPI.Intracomm) -> None:
    """Destroy the gloo group. Collective: all ranks must have finished using it."""
    comm.Barrier()
    dist.destroy_process_group()


def mpi_library() -> str:
    """Return name and version of the MPI library."""
    vendor, numbers = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, numbers))}"


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions of MPI, Python, and the relevant packages that are installed."""
    name, _, number = mpi_library().rpartition(" ")
    found = {name: number, "Python": platform.python_version()}
    for package in (*PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def report(result: dict[str, Any]) -> None:
    """Print the result for the launching script. Called by one rank."""
    print(f"{MARK}{json.dumps(result)}", flush=True)
