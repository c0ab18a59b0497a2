"""Judgement of links between ranks, and the clocks of hosts."""

import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from mntrain.checks.finding import Finding, passed
from mntrain.comm.links import LinkSpeed
from mntrain.comm.mpi import Communicator

_CLOCK_MESSAGES = 5
_SLOW = 0.5  # of the fastest pair's bandwidth


def clock_offsets(comm: Communicator, leaders: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return bounds in seconds of how far the clock of each leader is ahead of rank 0's.

    Collective; the result, by rank, is the same on every rank. Source: Cristian, "Probabilistic
    clock synchronization", Distributed Computing 3, 1989.
    """
    bounds = {0: (0.0, 0.0)}
    for leader in leaders:
        clock = np.zeros(1)
        for _ in range(_CLOCK_MESSAGES * (leader != 0)):
            if comm.rank == 0:
                before = time.time()
                comm.send(leader, np.zeros(1, np.uint8), counted=False).wait()
                comm.receive(leader, clock.view(np.uint8)).wait()
                found = float(clock[0]) - time.time(), float(clock[0]) - before
                bounds[leader] = min(
                    bounds.get(leader, found), found, key=lambda pair: pair[1] - pair[0]
                )
            elif comm.rank == leader:
                comm.receive(0, np.zeros(1, np.uint8)).wait()
                clock[0] = time.time()
                comm.send(0, clock.view(np.uint8), counted=False).wait()
    everyone: list[dict[int, tuple[float, float]]] = comm.gather_objects(bounds)
    return everyone[0]


def slowest_node(links: Sequence[LinkSpeed]) -> int | None:
    """Return the leader whose links are slowest by their median; None for fewer than three."""
    speeds: dict[int, list[float]] = {}
    for link in links:
        for rank in (link.one, link.other):
            speeds.setdefault(rank, []).append(link.mb_per_s)
    return min(speeds, key=lambda rank: median(speeds[rank])) if len(speeds) > 2 else None


def judge(links: Sequence[LinkSpeed], hosts: Sequence[str], where: str) -> Finding:
    """Name the slowest pair, and between nodes the slowest node. `hosts` is by rank. Pure."""
    if not links:
        return passed(f"there is no pair {where}")
    slowest = min(links, key=lambda link: link.mb_per_s)
    fastest = max(links, key=lambda link: link.mb_per_s)
    count = f"{len(links)} pair{'s' * (len(links) > 1)}"
    text = f"the slowest of {count} {where} is {_pair(slowest, hosts)}"
    node = slowest_node(links) if where == BETWEEN else None
    if node is not None:
        text += f"; the slowest node is {hosts[node]}"
    if where == BETWEEN and slowest.mb_per_s < _SLOW * fastest.mb_per_s:
        name = hosts[slowest.other] if node is None else hosts[node]
        return Finding(
            "warn",
            f"{text}; the fastest pair is {_pair(fastest, hosts)}",
            f"leave {name} out of the job (srun --exclude={name}), or have its network checked",
        )
    return passed(text)


def _pair(link: LinkSpeed, hosts: Sequence[str]) -> str:
    """Return a pair with its speed in words."""
    one, other = hosts[link.one], hosts[link.other]
    names = f"{one} (ranks {link.one} and {link.other})" if one == other else f"{one} and {other}"
    return f"{names}: {link.latency_us:.0f} us, {link.mb_per_s:.0f} MB/s"


WITHIN, BETWEEN = "within nodes", "between nodes"
