"""Checks over the facts of all ranks, by rank. Pure: each returns a finding."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations

from mntrain.checks.facts import RankFacts
from mntrain.checks.finding import Finding, naming, passed
from mntrain.checks.host import merge

Facts = Sequence[RankFacts]
# Versions that decide about results and messages; others that differ are a warning.
_DECISIVE = ("mntrain", "torch", "MPI")
_CLOCK_LIMIT_S = 1.0


def by_host(facts: Facts) -> list[list[int]]:
    """Return the ranks of each host, by the order of their first rank."""
    hosts: dict[int, list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault(fact.host_key, []).append(rank)
    return list(hosts.values())


def cores(facts: Facts) -> Finding:
    """Find hosts with more ranks than cores that these may use."""
    for ranks in by_host(facts):
        usable = frozenset[int]().union(*(facts[rank].cores for rank in ranks))
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
    for ranks in by_host(facts):
        usable = frozenset[int]().union(*(facts[rank].cores for rank in ranks))
        if len(ranks) > len(usable):
            continue  # `cores` warns of it
        by_set: dict[frozenset[int], list[int]] = {}
        for rank in ranks:
            by_set.setdefault(facts[rank].cores, []).append(rank)
        crowded = [same for own, same in by_set.items() if len(same) > len(own)]
        crossing = [
            by_set[one] + by_set[other] for one, other in combinations(by_set, 2) if one & other
        ]
        if crowded or crossing:
            group = (crowded or crossing)[0]
            shared = frozenset.intersection(*(facts[rank].cores for rank in group))
            return Finding(
                "warn",
                f"{naming('rank', group)} on {facts[group[0]].host} are bound to the same "
                f"{naming('core', sorted(shared))}, so they slow each other down",
                "give each rank cores of its own: mpirun --bind-to core (MPICH: -bind-to core), "
                "srun --cpu-bind=cores --cpus-per-task=N; do not bind ranks with taskset",
            )
    return passed("no ranks are bound to the same cores")


def threads(facts: Facts) -> Finding:
    """Find ranks that compute with more threads than there are cores for."""
    for ranks in by_host(facts):
        usable = frozenset[int]().union(*(facts[rank].cores for rank in ranks))
        counts = [facts[rank].threads for rank in ranks]
        for rank, count in zip(ranks, counts, strict=True):
            own = facts[rank].cores
            if own and count > len(own):
                return _too_many(facts, rank, f"bound to {naming('core', sorted(own))}", len(own))
        if usable and max(counts) > 1 and sum(counts) > len(usable):
            rank = ranks[counts.index(max(counts))]
            text = f"one of {len(ranks)} ranks on {len(usable)} cores"
            return _too_many(facts, rank, text, max(1, len(usable) // len(ranks)))
    return passed("no more threads than cores")


def _too_many(facts: Facts, rank: int, place: str, allowed: int) -> Finding:
    """Return the finding of a rank with too many threads."""
    fact = facts[rank]
    return Finding(
        "warn",
        f"rank {rank} on {fact.host} is set to {fact.threads} threads, but is {place}: "
        "threads that share a core slow all ranks down",
        f"set OMP_NUM_THREADS={allowed}, or unset it (mntrain then chooses), or bind each rank to "
        f"{fact.threads} cores",
    )


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


CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    versions,
    cores,
    binding,
    threads,
    gpus,
    clocks,
)
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
