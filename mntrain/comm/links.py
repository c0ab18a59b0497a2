"""Latency and bandwidth between pairs of ranks.

Pairs are measured in matchings, one after another: in each, every rank has at most one partner, and
its pairs are measured at once. Each direction of a pair is timed alone. Source of the matchings:
the circle method (Kirkman, 1847).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from mntrain.comm.mpi import Communicator

_TRIPS = 20, 300  # round trips of a small message, at least and at most: 3 % loss show in 300
_ALL_TRIPS = 6000  # of a rank with all others, where there are many
_TRIPS_S = 2.0  # for those of a pair, which a link that loses messages takes long for
_FIRST_BYTES = 64 << 10  # of messages for the bandwidth, which double
_LEAST = 3  # messages in a direction, of which the first opens what large ones need
_MATCHING_S = 0.2  # the most for one matching, but for
_RAMP_TRIPS = 20  # round trips in each direction, in which TCP's window doubles from 10 segments
_ANSWER_BYTES = 16
_STOP, _COUNT = -1, -2  # orders, in place of a number of bytes

T = TypeVar("T")


@dataclass(frozen=True)
class LinkSpeed:
    """The speed between two ranks, of which `one` is the lower. MB are 10^6 bytes."""

    one: int
    other: int
    latency_us: float  # half of a round trip of 16 bytes, the median
    mb_per_s_there: float  # from one to the other
    mb_per_s_back: float
    segments: int = 0  # TCP segments that both hosts have sent meanwhile; 0 if unknown
    resent: int = 0  # of these, those that were sent again, since they were lost

    @property
    def mb_per_s(self) -> float:
        """The mean of both directions, for equal bytes each way."""
        return 2 / (1 / self.mb_per_s_there + 1 / self.mb_per_s_back)


def matchings(members: Sequence[T]) -> Iterator[list[tuple[T, T]]]:
    """Yield matchings, of disjoint pairs, in which each pair of members occurs once. Pure."""
    circle: list[T | None] = [*members, *([None] if len(members) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]


def measure(
    comm: Communicator,
    members: Sequence[int],
    seconds: float,
    *,
    most_bytes: int,
    at_matching: Callable[[], None] = lambda: None,
) -> list[LinkSpeed]:
    """Return the speed between every pair of some ranks, sorted. Collective over `comm`.

    Takes at most about `seconds`; slow links, and those of high latency, take longer. Messages have
    `most_bytes` at most.
    `at_matching` is called before each matching. The result is the same on every rank.
    """
    together = list(matchings(sorted(members)))
    found: list[LinkSpeed] = []
    for pairs in together:
        comm.gather(None)  # a barrier, in which the other ranks sleep
        at_matching()
        for one, other in (sorted(pair) for pair in pairs):
            if comm.rank == one:
                trips = max(_TRIPS[0], min(_TRIPS[1], _ALL_TRIPS // len(together)))
                matching_s = min(_MATCHING_S, seconds / len(together))
                found.append(_lead(comm, other, trips, most_bytes, matching_s))
            elif comm.rank == other:
                _follow(comm, one, most_bytes)
    gathered = [link for links in comm.gather(found) for link in links]
    return sorted(gathered, key=lambda link: (link.one, link.other))


def best_of(links: Sequence[LinkSpeed], again: Sequence[LinkSpeed]) -> list[LinkSpeed]:
    """Return the best of two measurements of the same pairs, in each direction and loss. Pure.

    A busy host delays now one and now another, and a bad link is bad each time.
    """
    return [
        LinkSpeed(
            first.one,
            first.other,
            min(first.latency_us, second.latency_us),
            max(first.mb_per_s_there, second.mb_per_s_there),
            max(first.mb_per_s_back, second.mb_per_s_back),
            *min(
                ((link.segments, link.resent) for link in (first, second)),
                key=lambda counts: counts[1] / max(counts[0], 1),
            ),
        )
        for first, second in zip(links, again, strict=True)
    ]


def _lead(
    comm: Communicator, peer: int, most_trips: int, most_bytes: int, seconds: float
) -> LinkSpeed:
    """Measure the latency to a rank that runs `_follow`, and each direction for half the time."""
    data, answer = np.ones(most_bytes, np.uint8), np.zeros(2, np.int64)

    def transfer(there: int, back: int) -> float:
        """Send bytes and receive others; return the seconds that it takes."""
        start = time.perf_counter()
        comm.send(peer, _numbers(there, back).view(np.uint8)).wait()
        if there > 0:
            comm.send(peer, data[:there]).wait()
        received = answer.view(np.uint8) if back == _ANSWER_BYTES else data[:back]
        comm.receive(peer, received).wait()
        return time.perf_counter() - start

    def rate(time_of: Callable[[int], float]) -> float:
        """Return the MB/s in one direction, of the better of the last two messages.

        Messages double until one takes a quarter of the time, or as long as two round trips:
        another program may hold up one, and TCP's window opens over several round trips.
        """
        speeds: list[float] = []
        start, nbytes, largest, took_s = time.perf_counter(), _FIRST_BYTES, 0, 0.0
        while len(speeds) < _LEAST or (
            largest < _LEAST and time.perf_counter() + 2 * took_s < start + most_s
        ):
            took_s = time_of(nbytes)
            speeds.append(nbytes / max(took_s - trip_s, took_s / 2) / 1e6)
            largest += nbytes == most_bytes
            if took_s - trip_s < max(seconds / 4 - trip_s, 2 * trip_s):
                nbytes = min(2 * nbytes, most_bytes)
        return max(speeds[-2:])

    before, start = tcp_segments(), time.perf_counter()
    times = [transfer(0, _ANSWER_BYTES)]  # which may connect
    while len(times) <= most_trips and time.perf_counter() < start + _TRIPS_S:
        times.append(transfer(0, _ANSWER_BYTES))
    after = tcp_segments()
    transfer(_COUNT, _ANSWER_BYTES)
    segments, resent = (int(x - y + z) for x, y, z in zip(after, before, answer, strict=True))
    trip_s = median(times[1:] or times)
    most_s = seconds / 2 + _RAMP_TRIPS * trip_s
    there = rate(lambda nbytes: transfer(nbytes, _ANSWER_BYTES))
    back = rate(lambda nbytes: transfer(0, nbytes))
    comm.send(peer, _numbers(_STOP, 0).view(np.uint8)).wait()
    return LinkSpeed(comm.rank, peer, trip_s / 2 * 1e6, there, back, segments, resent)


def _follow(comm: Communicator, peer: int, most_bytes: int) -> None:
    """Receive as many bytes as the peer says, and send as many as it asks for, until it stops."""
    before, data, numbers = tcp_segments(), np.ones(most_bytes, np.uint8), _numbers(0, 0)
    while True:
        comm.receive(peer, numbers.view(np.uint8)).wait()
        there, back = numbers.tolist()
        if there == _STOP:
            return
        sent = data[:back]
        if there == _COUNT:
            now = tcp_segments()
            sent = _numbers(now[0] - before[0], now[1] - before[1]).view(np.uint8)
        elif there:
            comm.receive(peer, data[:there]).wait()
        comm.send(peer, sent).wait()


def _numbers(first: int, second: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array([first, second], np.int64)


def tcp_segments() -> tuple[int, int]:
    """Return the TCP segments that this host has sent, and sent again; 0 if unknown. Local."""
    try:
        text = Path("/proc/self/net/snmp").read_text()
        names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
        counts = dict(zip(names, values, strict=True))
        return int(counts["OutSegs"]), int(counts["RetransSegs"])
    except (OSError, ValueError, KeyError):
        return 0, 0
