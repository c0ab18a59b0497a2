"""Latency and bandwidth between pairs of ranks.

Pairs are measured in rounds, as in a tournament: in each, every rank has at most one partner, and
disjoint pairs are measured at once. Source of the rounds: the circle method (Kirkman, 1847).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TypeVar

import numpy as np

from mntrain.comm.mpi import Communicator

_SMALL_MESSAGES = 20  # round trips of 8 bytes
_WARM_BYTES = 64 << 10  # of a first message, which opens what large ones need
_FIRST_BYTES, _MOST_BYTES = 256 << 10, 4 << 20  # of messages for the bandwidth, which double
_LARGEST = 3  # messages of the most bytes
_ROUND_S = 0.2  # the most for one round
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


def measure(
    comm: Communicator,
    groups: Sequence[Sequence[int]],
    seconds: float,
    *,
    most_rounds: int | None = None,
    most_bytes: int = _MOST_BYTES,
) -> list[LinkSpeed]:
    """Return the speed of every pair of ranks in each group, sorted. Collective.

    Groups are disjoint and measured at once, for at most about `seconds`; slow links take longer.
    With `most_rounds`, each rank is measured with so many others only. Messages have `most_bytes`
    at most. The result is the same on every rank.
    """
    plans = [list(islice(rounds(sorted(group)), most_rounds)) for group in groups]
    count = max((len(plan) for plan in plans), default=0)
    found: list[LinkSpeed] = []
    for number in range(count):
        comm.gather_objects(None)  # a barrier, in which the other ranks sleep
        pairs = [pair for plan in plans if number < len(plan) for pair in plan[number]]
        for one, other in (sorted(pair) for pair in pairs):
            if comm.rank == one:
                found.append(_lead(comm, other, min(_ROUND_S, seconds / count), most_bytes))
            elif comm.rank == other:
                _echo(comm, one)
    gathered = [link for links in comm.gather_objects(found) for link in links]
    return sorted(gathered, key=lambda link: (link.one, link.other))


def _lead(comm: Communicator, peer: int, seconds: float, most_bytes: int) -> LinkSpeed:
    """Measure the link to a peer that runs `_echo`."""
    times = [_round_trip(comm, peer, np.zeros(8, np.uint8)) for _ in range(_SMALL_MESSAGES)]
    start, nbytes, largest = time.perf_counter(), _FIRST_BYTES, 0
    speeds: list[float] = []
    _round_trip(comm, peer, np.ones(_WARM_BYTES, np.uint8))
    while True:
        took_s = _round_trip(comm, peer, np.ones(nbytes, np.uint8))
        speeds.append(2 * nbytes / took_s / 1e6)
        left_s = seconds - (time.perf_counter() - start)
        # A message that takes as long as the whole round is long enough alone.
        if left_s < 2 * took_s and (len(speeds) > 1 or took_s > seconds):
            break
        largest += nbytes == most_bytes
        if largest == _LARGEST:
            break
        nbytes = min(2 * nbytes, most_bytes)
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
