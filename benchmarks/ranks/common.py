"""What the ranks' scripts share: a gloo group, facts, and the report."""

import json
import platform
import socket
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist
from mpi4py import MPI

MARK = "RESULT "  # as the script beside which these ranks were started looks for it
PACKAGES = ("mntrain", "torch", "mpi4py", "numpy")


class AbsentError(Exception):
    """A peer cannot be had here; the text says why."""


def absence(error: BaseException) -> AbsentError:
    """Why something cannot be imported or started, on one line, for a table."""
    return AbsentError(f"{type(error).__name__}: {' '.join(str(error).split())}")


def start_gloo(comm: MPI.Intracomm) -> None:
    """Make torch.distributed's gloo group of the same ranks, over the same link. Collective."""
    mine = None
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            host = socket.gethostbyname(socket.gethostname())
            mine = f"tcp://{host}:{free.getsockname()[1]}"
    dist.init_process_group("gloo", comm.bcast(mine), rank=comm.rank, world_size=comm.size)


def stop_gloo(comm: MPI.Intracomm) -> None:
    """End it. Collective: who leaves closes connections that others may still read from."""
    comm.Barrier()
    dist.destroy_process_group()


def start_horovod() -> Any:
    """Horovod over the MPI in use. AbsentError where it is not there, or was built without MPI."""
    try:
        import horovod.torch as hvd  # noqa: PLC0415 - few have it
    except Exception as error:  # whatever its parts raise where something is missing
        raise absence(error) from error
    if not hvd.mpi_built():
        raise AbsentError("built without MPI")
    hvd.init()
    return hvd


def mpi_library() -> str:
    """Name and version of the MPI library."""
    vendor, numbers = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, numbers))}"


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Of MPI, Python and every package that matters, where it is installed."""
    name, _, number = mpi_library().rpartition(" ")
    found = {name: number, "Python": platform.python_version()}
    for package in (*PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def report(what: dict[str, Any]) -> None:
    """Hand what was measured to who started the job. One rank does."""
    print(f"{MARK}{json.dumps(what)}", flush=True)
