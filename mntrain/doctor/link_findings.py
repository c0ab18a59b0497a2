"""Judgement of links between ranks, and the clocks of hosts."""

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from mntrain.checks.finding import Finding, passed, worst
from mntrain.comm.links import LinkSpeed
from mntrain.comm.mpi import Communicator

_CLOCK_MESSAGES = 5
_SLOW = 0.5  # of the fastest direction's rate
_FAR_BELOW, _BELOW = 0.5, 0.7  # of the expected rate
_LOST, _LEAST_LOST = 0.005, 2  # of the segments of small messages, which no queue drops
_SLOW_TRIPS = 0.02  # of all round trips


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


class Direction(NamedTuple):
    """One direction of a pair of ranks."""

    sender: int
    receiver: int
    mb_per_s: float
    latency_us: float

    def words(self, hosts: Sequence[str]) -> str:
        """Return the direction with its speed in words."""
        sender, receiver = hosts[self.sender], hosts[self.receiver]
        if sender == receiver:
            sender, receiver = f"rank {self.sender}", f"rank {self.receiver} on {sender}"
        rate = f"{self.mb_per_s:.0f}" if self.mb_per_s >= 10 else f"{self.mb_per_s:.2g}"
        return f"from {sender} to {receiver}: {self.latency_us:.0f} us, {rate} MB/s"


def directions(links: Sequence[LinkSpeed]) -> list[Direction]:
    """Return both directions of each pair. Pure."""
    there = [Direction(x.one, x.other, x.mb_per_s_there, x.latency_us) for x in links]
    back = [Direction(x.other, x.one, x.mb_per_s_back, x.latency_us) for x in links]
    return there + back


def slowest_node(links: Sequence[LinkSpeed]) -> int | None:
    """Return the leader that sends or receives slowest by the median; None for fewer than three."""
    sides = _sides(directions(links))
    if len({rank for rank, _ in sides}) < 3:
        return None
    return min(sides, key=lambda side: sides[side])[0]


def _sides(ways: Sequence[Direction]) -> dict[tuple[int, str], float]:
    """Return the median rate of what each rank sends and of what it receives."""
    speeds: dict[tuple[int, str], list[float]] = {}
    for way in ways:
        speeds.setdefault((way.sender, "sends"), []).append(way.mb_per_s)
        speeds.setdefault((way.receiver, "receives"), []).append(way.mb_per_s)
    return {side: median(found) for side, found in speeds.items()}


def judge(
    links: Sequence[LinkSpeed],
    hosts: Sequence[str],
    where: str,
    expected: tuple[str, float] | None = None,
) -> Finding:
    """Name the slowest direction, and between nodes what is wrong with the links. Pure.

    `hosts` is by rank. `expected` is a rate between nodes in words and in MB/s.
    """
    if not links:
        return passed(f"there is no pair {where}")
    ways = directions(links)
    slowest = min(ways, key=lambda way: way.mb_per_s)
    text = f"the slowest of {len(ways)} directions {where} is {slowest.words(hosts)}"
    if where != BETWEEN:
        return passed(text)
    problems = [
        _below_expected(slowest, ways, hosts, expected) if expected else None,
        _slower_than_others(links, ways, hosts),
        _losses(links, hosts),
    ]
    found = [problem for problem in problems if problem is not None]
    if not found:
        return passed(text)
    return Finding(
        worst(found),
        "; ".join([text, *(problem.text for problem in found)]),
        "; ".join(dict.fromkeys(problem.fix for problem in found)),
    )


def _below_expected(
    slowest: Direction, ways: Sequence[Direction], hosts: Sequence[str], expected: tuple[str, float]
) -> Finding | None:
    words, rate = expected
    share = slowest.mb_per_s / rate
    if share >= _BELOW:
        return None
    count = sum(way.mb_per_s < _BELOW * rate for way in ways)
    return Finding(
        "fail" if share < _FAR_BELOW else "warn",
        f"that is {100 * share:.2g} % of the expected {words} ({rate:.4g} MB/s), and {count} of "
        f"{len(ways)} directions {'is' if count == 1 else 'are'} below {100 * _BELOW:.0f} %",
        _check_way(slowest, hosts),
    )


def _slower_than_others(
    links: Sequence[LinkSpeed], ways: Sequence[Direction], hosts: Sequence[str]
) -> Finding | None:
    """Compare each direction with the fastest; of two nodes, the two directions."""
    slowest = min(ways, key=lambda way: way.mb_per_s)
    fastest = max(ways, key=lambda way: way.mb_per_s)
    limit = _SLOW * fastest.mb_per_s
    if slowest.mb_per_s >= limit:
        return None
    text, fix = f"the fastest is {fastest.words(hosts)}", _check_way(slowest, hosts)
    node, sides = slowest_node(links), _sides(ways)
    slow = {} if node is None else {s: v for s, v in sides.items() if s[0] == node and v < limit}
    if node is not None and slow:
        name = hosts[node]
        verbs = " and ".join(verb for _, verb in slow)
        text = f"the slowest node is {name}, by what it {verbs}; {text}"
        fix = f"leave {name} out of the job (srun --exclude={name}), or have its network checked"
    return Finding("warn", text, fix)


def _check_way(way: Direction, hosts: Sequence[str]) -> str:
    sender, receiver = hosts[way.sender], hosts[way.receiver]
    return (
        f"have the way from {sender} to {receiver} checked (ethtool: speed and duplex of both "
        "interfaces; their errors and limits, and those of the switch), and the interface that MPI "
        "uses"
    )


def _losses(links: Sequence[LinkSpeed], hosts: Sequence[str]) -> Finding | None:
    """Find pairs that lose small messages, or whose latency varies as if they did."""
    lossy = [
        link
        for link in links
        if link.resent >= _LEAST_LOST and link.resent >= _LOST * link.segments
    ]
    if lossy:
        most = max(lossy, key=lambda link: link.resent / link.segments)
        text = (
            f"between {hosts[most.one]} and {hosts[most.other]} packets are lost: {most.resent} of "
            f"{most.segments} TCP segments of small messages were sent again"
        )
        if most.slow_trips:
            text += f", and {most.slow_trips} of {most.trips} round trips took far longer than most"
    else:
        varying = [
            link
            for link in links
            if link.slow_trips >= _LEAST_LOST and link.slow_trips >= _SLOW_TRIPS * link.trips
        ]
        if not varying:
            return None
        most = max(varying, key=lambda link: link.slow_trips)
        text = (
            f"the latency between {hosts[most.one]} and {hosts[most.other]} varies: "
            f"{most.slow_trips} of {most.trips} round trips took 0.1 s or more, as where packets "
            "are lost or other programs use the cores"
        )
    return Finding(
        "warn",
        text,
        f"have cables, ports and duplex of {hosts[most.one]} and {hosts[most.other]} checked "
        "(ethtool -S, ip -s link: errors and drops)",
    )


WITHIN, BETWEEN = "within nodes", "between nodes"
