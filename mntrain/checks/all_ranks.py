"""Checks over the facts of all ranks, by rank. A check is pure, and returns a finding."""

import hashlib
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path

import torch

from mntrain._version import __version__
from mntrain.checks import host as host_checks
from mntrain.checks import launcher
from mntrain.checks.finding import Finding, merge, naming, passed
from mntrain.recorder.events import pid_namespace

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Versions that decide about results and messages; others that differ are a warning.
_DECISIVE = ("mntrain", "torch", "MPI")
_CLOCK_LIMIT_S = 1.0


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


Facts = Sequence[RankFacts]


def collect(
    *, host: str, host_key: int, gpu: str, library: str, size: int, clock: tuple[float, float]
) -> RankFacts:
    """Return the facts of this process, in a job of `size` ranks. Local.

    `library` is the full version string of MPI. Digests tell checkouts and builds apart.
    """
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
            "numpy": _installed("numpy"),
            "MPI": f"{' '.join(library.split()[:3])} (build {_digest(library.encode())})",
            "mpi4py": _installed("mpi4py"),
            "Python": platform.python_version(),
        },
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


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _source_digest() -> str:
    """Return eight hexadecimal digits of the Python sources of this distribution."""
    root = Path(__file__).parents[2]
    found = (path for package in ("mntrain", "zero") for path in (root / package).rglob("*.py"))
    paths = sorted(path for path in found if path.is_file())  # no locks of editors
    return _digest(*(str(path.relative_to(root)).encode() + path.read_bytes() for path in paths))


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"\0".join(parts), digest_size=4).hexdigest()


def by_host(facts: Facts) -> list[list[int]]:
    """Return the ranks of each host, by the order of their first rank."""
    hosts: dict[int, list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault(fact.host_key, []).append(rank)
    return list(hosts.values())


def _with_cores(facts: Facts) -> Iterator[tuple[list[int], frozenset[int]]]:
    """Yield the ranks of each host, and the cores that any of them may use."""
    for ranks in by_host(facts):
        yield ranks, frozenset[int]().union(*(facts[rank].cores for rank in ranks))


def cores(facts: Facts) -> Finding:
    """Find hosts with more ranks than cores that these may use."""
    for ranks, usable in _with_cores(facts):
        first = facts[ranks[0]]
        if not usable or len(ranks) <= len(usable):
            continue
        where = f"the {len(usable)} core{'s' * (len(usable) > 1)} of {first.host}"
        fix = f"start at most {len(usable)} ranks there"
        if len(usable) < first.host_cores:
            where += f" that they are bound to (of {first.host_cores})"
            fix += ", or let them use more: mpirun --bind-to none, srun --cpus-per-task"
        return Finding("warn", f"{len(ranks)} ranks share {where}, so each is slower", fix)
    return passed("every rank can have a core")


def binding(facts: Facts) -> Finding:
    """Find ranks that the launcher has bound to the same cores while others are free."""
    for ranks, usable in _with_cores(facts):
        if len(ranks) > len(usable):
            continue  # `cores` warns of it
        by_set: dict[frozenset[int], list[int]] = {}
        for rank in ranks:
            by_set.setdefault(facts[rank].cores, []).append(rank)
        crowded = [same for own, same in by_set.items() if len(same) > len(own)]
        crowded += [
            by_set[one] + by_set[other] for one, other in combinations(by_set, 2) if one & other
        ]
        if crowded:
            shared = frozenset.intersection(*(facts[rank].cores for rank in crowded[0]))
            return Finding(
                "warn",
                f"{naming('rank', crowded[0])} on {facts[crowded[0][0]].host} are bound to the "
                f"same {naming('core', sorted(shared))}, so they slow each other down",
                "give each rank cores of its own: mpirun --bind-to core (MPICH: -bind-to core), "
                "srun --cpu-bind=cores --cpus-per-task=N; do not bind ranks with taskset",
            )
    return passed("no ranks are bound to the same cores")


def threads(facts: Facts) -> Finding:
    """Find ranks that compute with more threads than there are cores for."""
    found = next(_too_many_threads(facts), None)
    if found is None:
        return passed("no more threads than cores")
    rank, place, allowed = found
    fact = facts[rank]
    return Finding(
        "warn",
        f"rank {rank} on {fact.host} is set to {fact.threads} threads, but is {place}: "
        "threads that share a core slow all ranks down",
        f"set OMP_NUM_THREADS={allowed}, or unset it (mntrain then chooses), or bind each rank to "
        f"{fact.threads} cores",
    )


def _too_many_threads(facts: Facts) -> Iterator[tuple[int, str, int]]:
    """Yield ranks with more threads than cores, where they run, and how many they may have."""
    for ranks, usable in _with_cores(facts):
        counts = [facts[rank].threads for rank in ranks]
        for rank, count in zip(ranks, counts, strict=True):
            own = facts[rank].cores
            if own and count > len(own):
                yield rank, f"bound to {naming('core', sorted(own))}", len(own)
        if usable and max(counts) > 1 and sum(counts) > len(usable):
            place = f"one of {len(ranks)} ranks on {len(usable)} cores"
            yield ranks[counts.index(max(counts))], place, max(1, len(usable) // len(ranks))


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
    """Compare the versions of all ranks with those of rank 0."""
    first = facts[0].versions
    others = {
        name: [rank for rank, fact in enumerate(facts) if fact.versions.get(name) != version]
        for name, version in first.items()
    }
    differing = sorted((name for name in first if others[name]), key=lambda n: n not in _DECISIVE)
    if not differing:
        return passed(", ".join(f"{name} {version}" for name, version in first.items()))
    parts = []
    for name in differing:
        ranks, other = others[name], facts[others[name][0]]
        parts.append(
            f"{name} differs between ranks: rank 0 on {facts[0].host} has {first[name]}, "
            f"{naming('rank', ranks)} (the first on {other.host}) "
            f"{'has' if len(ranks) == 1 else 'have'} {other.versions.get(name, 'none')}"
        )
    return Finding(
        "fail" if differing[0] in _DECISIVE else "warn",
        "; ".join(parts),
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


CHECKS: tuple[Callable[[Facts], Finding], ...] = (versions, cores, binding, threads, gpus, clocks)
"""All checks over the facts of the ranks, in the order of the report."""


def fair_threads(facts: Facts, rank: int) -> int:
    """Return a rank's share of the physical cores that it may use, at least 1.

    Each core is shared evenly by the ranks of its host that may use it.
    """
    own = facts[rank]
    users = [fact.cores for fact in facts if fact.host_key == own.host_key]
    logical = sum(1 / sum(core in cores for cores in users) for core in own.cores)
    return max(1, math.floor(logical * own.physical / len(own.cores) + 1e-6))


def examine(facts: Facts) -> dict[str, Finding]:
    """Return the finding of each check by its name, those of the hosts merged over ranks."""
    hosts = {
        name: merge([(fact.host, fact.findings[name]) for fact in facts])
        for name in facts[0].findings
    }
    return hosts | {check.__name__: check(facts) for check in CHECKS}
