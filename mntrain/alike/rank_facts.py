"""Facts of all ranks and their hosts, and checks over them, which are pure and return a finding."""

import hashlib
import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from mntrain._version import __version__
from mntrain.alike.naming import difference, naming
from mntrain.checks import host as host_checks
from mntrain.checks import launcher
from mntrain.checks.finding import Finding, merge, passed
from mntrain.recorder.events import pid_namespace

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Versions that decide about results and messages; others that differ are a warning.
_DECISIVE = ("mntrain", "torch", "MPI")
_CLOCK_LIMIT_S = 1.0
_ROUNDING = 1e-6  # of sums of shares


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
    clock: tuple[float, float]  # see `clocks`
    findings: dict[str, Finding]  # of the checks of its host, by name
    pid: int = 0  # in its pid_namespace
    pid_namespace: str = ""
    quota: float = math.inf  # CPUs that its cgroup may use
    launcher_cores: int = 0  # of Open MPI's daemon, which may have bound its ranks to fewer; else 0


Facts = Sequence[RankFacts]


def collect(
    *, host: str, host_key: int, gpu: str, library: str, size: int, clock: tuple[float, float]
) -> RankFacts:
    """Return the facts of this process, in a job of `size` ranks. Local.

    `library` is the full version string of MPI. Digests tell checkouts and builds apart.
    """
    local_size = launcher.local_size(os.environ)
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
        versions={
            "mntrain": f"{__version__} (sources {_source_digest()})",
            "torch": torch.__version__,
            "numpy": _version("numpy"),
            "MPI": f"{' '.join(library.split()[:3])} (build {_digest(library.encode())})",
            "mpi4py": _version("mpi4py"),
            "Python": platform.python_version(),
        },
        clock=clock,
        findings={
            "world size": launcher.world_size(os.environ, size),
            "open files": host_checks.open_files(size),
            "shared memory": host_checks.shared_memory(library, local_size, creates=False),
        },
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        quota=cpu_quota(),
        launcher_cores=_launcher_cores() if known else 0,
    )


def _launcher_cores() -> int:
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return 0
    try:
        return len(os.sched_getaffinity(os.getppid()))
    except OSError:  # of another user, or ended
        return 0


def cpu_quota(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the CPUs that this process's cgroup may use, such as a container's. Local.

    Infinity without a limit. Of both versions of cgroups (man cgroups; cpu.max, cpu.cfs_quota_us).
    """
    least = math.inf
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        place = top / path.lstrip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(top):
                quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
                quota = quota or _text(folder / "cpu.cfs_quota_us").strip()
                period = period or _text(folder / "cpu.cfs_period_us").strip()
                if quota.isdigit() and period.isdigit():  # neither "max" nor -1
                    least = min(least, int(quota) / int(period))
    return least


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # built into a folder on the path
        return "unknown"


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


@cache  # takes some 15 ms
def _source_digest() -> str:
    """Return eight hexadecimal digits of the Python sources of this distribution."""
    root = Path(__file__).parents[2]
    found = (path for package in ("mntrain", "zero") for path in (root / package).rglob("*.py"))
    paths = sorted(path for path in found if path.is_file())  # no locks of editors
    return _digest(*(str(path.relative_to(root)).encode() + path.read_bytes() for path in paths))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:8]  # which FIPS allows


def by_host(facts: Facts) -> list[list[int]]:
    """Return the ranks of each host, by the order of their first rank."""
    hosts: dict[int, list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault(fact.host_key, []).append(rank)
    return list(hosts.values())


def core_shares(facts: Facts) -> list[float]:
    """Return the number of logical cores that each rank has; inf where the system does not say.

    Each core is shared evenly by the ranks of its host that may use it.
    """
    users: Counter[tuple[int, int]] = Counter()
    for fact in facts:
        users.update((fact.host_key, core) for core in fact.cores)
    return [
        sum(1 / users[fact.host_key, core] for core in fact.cores) or math.inf for fact in facts
    ]


def cores(facts: Facts) -> Finding:
    """Find a host with ranks that have less than a core, by their number or their binding."""
    shares = core_shares(facts)
    for ranks in by_host(facts):
        crowded = [rank for rank in ranks if shares[rank] < 1 - _ROUNDING]
        if not crowded:
            continue
        host, of_host = facts[ranks[0]].host, facts[ranks[0]].host_cores
        usable = frozenset[int]().union(*(facts[rank].cores for rank in crowded))
        where = f"the {len(usable)} core{'s' * (len(usable) > 1)} of {host}"
        fix = f"start at most {len(usable)} ranks there"
        if len(usable) < of_host:
            where += f" that they are bound to ({naming('rank', crowded)}; {of_host} cores in all)"
            fix = (
                "let each use cores of its own: mpirun --bind-to core or none (MPICH: -bind-to), "
                "srun --cpu-bind=cores --cpus-per-task=N; or start fewer ranks there"
            )
        return Finding("warn", f"{len(crowded)} ranks share {where}, so each is slower", fix)
    return _limited(facts) or passed("every rank can have a core")


def _limited(facts: Facts) -> Finding | None:
    """Find a host whose ranks may use fewer CPUs than they could, by a quota or their launcher."""
    for ranks in by_host(facts):
        own = facts[ranks[0]]
        used = frozenset[int]().union(*(facts[rank].cores for rank in ranks))
        if own.quota < len(ranks) - _ROUNDING:
            return Finding(
                "warn",
                f"the cgroup of the {len(ranks)} ranks on {own.host} may use {own.quota:.3g} CPUs",
                "start fewer ranks there, or raise the limit (docker --cpus, limits.cpu)",
            )
        if 0 < 2 * len(used) <= own.launcher_cores:
            return Finding(
                "warn",
                f"Open MPI has bound the {len(ranks)} rank{'s' * (len(ranks) > 1)} on {own.host} "
                f"to {len(used)} of {own.launcher_cores} cores, as it does with two ranks or fewer",
                "mpirun --bind-to none, or --map-by slot:PE=N for N cores a rank",
            )
    return None


def threads(facts: Facts) -> Finding:
    """Find a rank that computes with more threads than it has cores."""
    for rank, (fact, share) in enumerate(zip(facts, core_shares(facts), strict=True)):
        allowed = max(1.0, share)
        if fact.threads > allowed + _ROUNDING:
            return Finding(
                "warn",
                f"rank {rank} on {fact.host} is set to {fact.threads} threads, but its share of "
                f"the cores is {share:.3g}: threads that share a core slow all ranks down",
                f"set OMP_NUM_THREADS={int(allowed + _ROUNDING)}, or unset it (mntrain then "
                f"chooses), or bind each rank to {fact.threads} cores",
            )
    return passed("no more threads than cores")


def gpus(facts: Facts) -> Finding:
    """Find GPUs that several ranks share."""
    users: dict[tuple[int, str], list[int]] = {}
    for rank, fact in enumerate(facts):
        if fact.gpu:
            users.setdefault((fact.host_key, fact.gpu), []).append(rank)
    if not users:
        return passed("no rank uses a GPU")
    ranks = max(users.values(), key=len)
    if len(ranks) == 1:
        return passed("every rank has a GPU of its own")
    return Finding(
        "warn",
        f"{naming('rank', ranks)} share a GPU of {facts[ranks[0]].host}, so each is slower and has "
        "less memory",
        "start no more ranks than GPUs, and make different GPUs or all of them visible to the "
        "ranks: srun --gpus-per-task=1 or --gpu-bind=none, or mpirun without a common "
        "CUDA_VISIBLE_DEVICES",
    )


def versions(facts: Facts) -> Finding:
    """Compare the versions of all ranks."""
    hosts = {rank: fact.host for rank, fact in enumerate(facts)}
    texts = {
        name: difference(name, [fact.versions.get(name, "nothing") for fact in facts], hosts)
        for name in facts[0].versions
    }
    if not any(texts.values()):
        return passed(", ".join(f"{name} {own}" for name, own in facts[0].versions.items()))
    return Finding(
        "fail" if any(texts.get(name) for name in _DECISIVE) else "warn",
        "; ".join(filter(None, texts.values())),
        "use one environment on a shared file system, or install the same versions on all hosts",
    )


def clocks(facts: Facts) -> Finding:
    """Find hosts whose clock differs from rank 0's by more than a second for certain.

    `clock` holds two local times between which all ranks took part in one collective. So at one
    moment each clock was within its own interval, which bounds the difference of two clocks.
    """
    early, late = facts[0].clock
    for rank, fact in enumerate(facts):
        least, most = fact.clock[0] - late, fact.clock[1] - early
        if least > _CLOCK_LIMIT_S or most < -_CLOCK_LIMIT_S:
            ahead = least > 0
            return Finding(
                "warn",
                f"the clock of {fact.host} (rank {rank}) is {least if ahead else -most:.1f} s or "
                f"more {'ahead of' if ahead else 'behind'} that of {facts[0].host}: times in logs "
                "do not compare, and files seem to be of the future",
                "synchronize the clocks of the hosts (chronyc tracking, timedatectl)",
            )
    if len({fact.host_key for fact in facts}) == 1:
        return passed("the ranks of one host have one clock")
    widest = max((fact.clock[1] - fact.clock[0] for fact in facts), default=0.0)
    return passed(f"no clocks differ by more than a second (measured to {widest:.3g} s)")


def hosts_apart(facts: Facts) -> list[str]:
    """Return the host of each rank, with its lowest rank where several hosts have one name."""
    keys: dict[str, set[int]] = {}
    for fact in facts:
        keys.setdefault(fact.host, set()).add(fact.host_key)
    return [
        fact.host if len(keys[fact.host]) == 1 else f"{fact.host} (rank {fact.host_key})"
        for fact in facts
    ]


CHECKS: tuple[Callable[[Facts], Finding], ...] = (versions, cores, threads, gpus, clocks)
"""All checks over the facts of the ranks, in the order of the report."""


def fair_threads(facts: Facts, rank: int) -> int:
    """Return a rank's share of the physical cores that it may use, at least 1."""
    own, ranks = facts[rank], next(ranks for ranks in by_host(facts) if rank in ranks)
    share = core_shares(facts)[rank] * own.physical / len(own.cores)
    share = min(share, own.quota / len(ranks))
    return max(1, math.floor(share + _ROUNDING))


def examine(facts: Facts) -> dict[str, Finding]:
    """Return the finding of each check by its name, those of the hosts merged over ranks."""
    hosts = {
        name: merge([(fact.host, fact.findings[name]) for fact in facts])
        for name in facts[0].findings
    }
    return hosts | {check.__name__: check(facts) for check in CHECKS}
