"""Facts about one rank that checks of the job compare over ranks."""

import hashlib
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from mntrain._version import __version__
from mntrain.checks import host as host_checks
from mntrain.checks import launcher
from mntrain.checks.finding import Finding
from mntrain.recorder.events import pid_namespace

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PACKAGES = ("mntrain", "zero")


@dataclass(frozen=True)
class RankFacts:
    """Facts about one rank and its host. Picklable, about 1 kB."""

    host: str
    host_key: int  # the lowest rank of its host
    cores: frozenset[int]  # logical cores that it may run on; empty if the system does not say
    physical: int  # physical cores that these belong to
    host_cores: int  # logical cores of its host
    threads: int  # of its computations, if the user has set them; else 0
    gpu: str  # identifier of its GPU; empty on the CPU
    versions: dict[str, str]  # of Python and of packages
    clock: tuple[float, float]  # see `all_ranks.clocks`
    findings: dict[str, Finding]  # of the checks of its host, by name
    pid: int = 0  # in its pid_namespace
    pid_namespace: str = ""


def collect(
    *,
    host: str,
    host_key: int,
    gpu: str,
    library: str,
    size: int,
    clock: tuple[float, float],
) -> RankFacts:
    """Return the facts of this process, in a job of `size` ranks. Local."""
    # OpenMP may have bound this thread alone to one core.
    bound = os.environ.get("OMP_PROC_BIND", "false").lower() != "false"
    known = hasattr(os, "sched_getaffinity") and not bound
    own = os.sched_getaffinity(0) if known else set()
    physical = len({_physical_core(core) for core in own})
    return RankFacts(
        host=host,
        host_key=host_key,
        cores=frozenset(own),
        physical=physical,
        host_cores=os.cpu_count() or 1,
        threads=_chosen_threads({len(own), physical, os.cpu_count()}),
        gpu=gpu,
        versions=versions(library),
        clock=clock,
        findings={
            "world size": launcher.world_size(os.environ, size),
            "open files": host_checks.open_files(size),
            "locked memory": host_checks.locked_memory(),
        },
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
    )


def _chosen_threads(defaults: set[int | None]) -> int:
    """Return the number of threads that the user has set, by a variable or a call; else 0.

    `defaults` are the numbers that torch may choose by itself. Of a variable that asks for more
    threads than there are cores, torch's own count shows nothing.
    """
    stated = [os.environ[name] for name in THREAD_VARIABLES if name in os.environ]
    count = torch.get_num_threads()
    if not stated and count in defaults:
        return 0
    return max([count, *(int(number) for number in stated if number.isdigit())])


def _physical_core(core: int) -> str:
    """Return the logical cores of the physical core that a logical one belongs to: "0,4"."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(core)


def versions(library: str) -> dict[str, str]:
    """Return the versions of Python, the packages and the MPI library, by name.

    `library` is the full version string of MPI. Digests tell checkouts and builds apart.
    """
    return {
        "mntrain": f"{__version__} (sources {_source_digest()})",
        "torch": torch.__version__,
        "numpy": _installed("numpy"),
        "MPI": f"{' '.join(library.split()[:3])} (build {_digest(library.encode())})",
        "mpi4py": _installed("mpi4py"),
        "Python": platform.python_version(),
    }


def _installed(name: str) -> str:
    """Return the version of an installed distribution, or "not installed"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _source_digest() -> str:
    """Return eight hexadecimal digits of the Python sources of this distribution."""
    root = Path(__file__).parents[2]
    found = (path for package in _PACKAGES for path in (root / package).rglob("*.py"))
    paths = sorted(path for path in found if path.is_file())  # no locks of editors
    return _digest(*(str(path.relative_to(root)).encode() + path.read_bytes() for path in paths))


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=4).hexdigest()
