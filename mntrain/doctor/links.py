"""Latency and bandwidth between pairs of ranks, and the clocks of hosts.

Pairs are measured in rounds, as in a tournament: in each, every rank has at most one partner, and
disjoint pairs are measured at once. Source of the rounds: the circle method (Kirkman, 1847).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np

from mntrain.checks.finding import Finding, passed
from mntrain.comm.mpi import Communicator

_SMALL_MESSAGES = 20  # round trips of 8 bytes
_CLOCK_MESSAGES = 5
_FIRST_BYTES, _MOST_BYTES = 256 << 10, 4 << 20  # of messages for the bandwidth, which double
_ROUND_S = 0.2  # the most for one round
_SLOW = 0.5  # of the fastest pair's bandwidth
_STOP = 0  # in place of the size of a message

T = TypeVar("T")


@dataclass(frozen=True)
class LinkSpeed:
    """The speed between two ranks, of which `one` is the lower."""

    one: int
    other: int
    latency_us: float  # half of a round trip of 8 bytes, the median
    mb_per_s: float  # 10^6 bytes, one way


def rounds(members: Sequence[T]) -> Iterator[list[tuple[T, T]]]:
    """Yield rounds of disjoint pairs, in which each pair of members occurs once. Pure."""
    circle: list[T | None] = [*members, *([None] if len(members) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]


def measure(comm: Communicator, groups: Sequence[Sequence[int]], seconds: float) -> list[LinkSpeed]:
    """Return the speed of every pair of ranks in each group, sorted. Collective.

    Groups are disjoint and measured at once, for about `seconds`; slow links take longer. The
    result is the same on every rank.
    """
    plans = [list(rounds(sorted(group))) for group in groups]
    count = max((len(plan) for plan in plans), default=0)
    found: list[LinkSpeed] = []
    for number in range(count):
        comm.gather_objects(None)  # a barrier, in which the other ranks sleep
        pairs = [pair for plan in plans if number < len(plan) for pair in plan[number]]
        for one, other in (sorted(pair) for pair in pairs):
            if comm.rank == one:
                found.append(_lead(comm, other, min(_ROUND_S, seconds / count)))
            elif comm.rank == other:
                _echo(comm, one)
    gathered = [link for links in comm.gather_objects(found) for link in links]
    return sorted(gathered, key=lambda link: (link.one, link.other))


def _lead(comm: Communicator, peer: int, seconds: float) -> LinkSpeed:
    """Measure the link to a peer that runs `_echo`."""
    times = [_round_trip(comm, peer, np.zeros(8, np.uint8)) for _ in range(_SMALL_MESSAGES)]
    start, nbytes, speeds = time.perf_counter(), _FIRST_BYTES, []
    _round_trip(comm, peer, np.ones(nbytes, np.uint8))  # opens what large messages need
    while True:
        took_s = _round_trip(comm, peer, np.ones(nbytes, np.uint8))
        speeds.append(2 * nbytes / took_s / 1e6)
        if time.perf_counter() - start + 2 * took_s > seconds and len(speeds) > 1:
            break
        nbytes = min(2 * nbytes, _MOST_BYTES)
    comm.send(peer, _header(_STOP), counted=False).wait()
    return LinkSpeed(comm.rank, peer, median(times[1:]) / 2 * 1e6, max(speeds[-2:]))


def _round_trip(
    comm: Communicator, peer: int, data: "np.ndarray[tuple[int], np.dtype[np.uint8]]"
) -> float:
    """Return the seconds until the peer has returned some bytes."""
    comm.send(peer, _header(data.nbytes), counted=False).wait()
    start = time.perf_counter()
    comm.send(peer, data, counted=False).wait()
    comm.receive(peer, data).wait()
    return time.perf_counter() - start


def _header(nbytes: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.array([nbytes], np.int64).view(np.uint8)


def _echo(comm: Communicator, peer: int) -> None:
    """Return messages to the peer until it stops."""
    while True:
        header = _header(_STOP)
        comm.receive(peer, header).wait()
        if not (nbytes := int(header.view(np.int64)[0])):
            return
        data = np.empty(nbytes, np.uint8)
        comm.receive(peer, data).wait()
        comm.send(peer, data, counted=False).wait()


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
