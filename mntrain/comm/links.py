"""Latency and bandwidth between pairs of ranks.

At the start of a world, `measure_link` takes some milliseconds for a few pairs. `measure` takes
seconds for all: in matchings, one after another, in each of which every rank has at most one
partner, and pairs are measured at once. Each direction of a pair is timed alone. Source of the
matchings: the circle method (Kirkman, 1847).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeAlias, TypeVar

import numpy as np

from mntrain.comm import clock
from mntrain.comm.link import Link
from mntrain.comm.mpi import Communicator
from mntrain.comm.topology import Topology

_TRIPS = 20, 300  # round trips of a small message, at least and at most: 3 % loss show in 300
_ALL_TRIPS = 6000  # of a rank with all others, where there are many
_TRIPS_S = 2.0  # for those of a pair, which a link that loses messages takes long for
_FIRST_BYTES = 64 << 10  # of messages for the bandwidth, which double
_LEAST = 3  # messages in a direction, of which the first opens what large ones need
_MATCHING_S = 0.2  # the most for one matching, but for
_RAMP_TRIPS = 20  # round trips in each direction, in which TCP's window doubles from 10 segments
_ANSWER_BYTES = 16
_STOP, _COUNT = -1, -2  # orders, in place of a number of bytes
# At the start: trips of each length, of which the fastest counts, since another program may delay
# some; the bytes of a long message; and the seconds after which no more trips begin, since a slow
# link needs no exact figures.
_START_TRIPS, _START_BYTES, _START_S = 8, 256 << 10, 0.01

_Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"

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


def measure_link(comm: Communicator, topology: Topology) -> Link | None:
    """Measure links between the first ranks of neighbouring nodes. Collective; some milliseconds.

    Each node is in one pair, but for the last one of an odd number. Returns the median of all
    pairs, the same on all ranks, or None if there is one node.
    """
    firsts = [node[0] for node in topology.nodes]
    if len(firsts) < 2:
        return None
    comm.gather(None)  # a barrier: all ranks are here, and do nothing else
    found = None
    for one, other in zip(firsts[::2], firsts[1::2], strict=False):
        if comm.rank == one:
            found = _lead_at_start(comm, other)
        elif comm.rank == other:
            _follow(comm, one, _START_BYTES)
    links = [link for link in comm.gather(found) if link is not None]
    latencies, rates = zip(*((link.latency_s, link.bytes_per_s) for link in links), strict=True)
    return Link(median(latencies), median(rates))


def _lead_at_start(comm: Communicator, peer: int) -> Link:
    """Measure the link to a rank that runs `_follow`."""
    data = np.ones(_START_BYTES, np.uint8)

    def trip_s(there: int) -> float:
        """Return the seconds of the fastest of some messages with their answers."""
        times: list[float] = []
        begun_s = clock.now()
        while len(times) < _START_TRIPS and (len(times) < 2 or clock.now() < begun_s + _START_S):
            times.append(_transfer(comm, peer, data, there, _ANSWER_BYTES))
        return min(times)

    short_s, long_s = trip_s(0), trip_s(_START_BYTES)
    _send(comm, peer, _STOP, 0)
    return Link(short_s / 2, _START_BYTES / max(long_s - short_s, long_s / 8))


def _lead(
    comm: Communicator, peer: int, most_trips: int, most_bytes: int, seconds: float
) -> LinkSpeed:
    """Measure the latency to a rank that runs `_follow`, and each direction for half the time."""
    data = np.ones(most_bytes, np.uint8)
    transfer = partial(_transfer, comm, peer, data)

    def segments() -> list[int]:
        """Return the TCP segments that both hosts have sent, and sent again."""
        transfer(_COUNT, _ANSWER_BYTES)
        theirs = data[:_ANSWER_BYTES].view(np.int64).tolist()
        return [sum(pair) for pair in zip(tcp_segments(), theirs, strict=True)]

    def rate(time_of: Callable[[int], float]) -> float:
        """Return the MB/s in one direction, of the better of the last two messages.

        Messages double until one takes a quarter of the time, or as long as two round trips:
        another program may hold up one, and TCP's window opens over several round trips.
        """
        speeds: list[float] = []
        start, nbytes, largest, took_s = clock.now(), _FIRST_BYTES, 0, 0.0
        while len(speeds) < _LEAST or (
            largest < _LEAST and clock.now() + 2 * took_s < start + most_s
        ):
            took_s = time_of(nbytes)
            speeds.append(nbytes / max(took_s - trip_s, took_s / 2) / 1e6)
            largest += nbytes == most_bytes
            if took_s - trip_s < max(seconds / 4 - trip_s, 2 * trip_s):
                nbytes = min(2 * nbytes, most_bytes)
        return max(speeds[-2:])

    before, start = segments(), clock.now()  # the first message may connect
    times = [transfer(0, _ANSWER_BYTES)]
    while len(times) < most_trips and clock.now() < start + _TRIPS_S:
        times.append(transfer(0, _ANSWER_BYTES))
    sent, resent = (now - then for now, then in zip(segments(), before, strict=True))
    trip_s = median(times)
    most_s = seconds / 2 + _RAMP_TRIPS * trip_s
    there = rate(lambda nbytes: transfer(nbytes, _ANSWER_BYTES))
    back = rate(lambda nbytes: transfer(0, nbytes))
    _send(comm, peer, _STOP, 0)
    return LinkSpeed(comm.rank, peer, trip_s / 2 * 1e6, there, back, sent, resent)


def _transfer(comm: Communicator, peer: int, data: _Bytes, there: int, back: int) -> float:
    """Send bytes of `data` to a rank that runs `_follow`, and receive others into it.

    Returns the seconds that it takes.
    """
    start = clock.now()
    _send(comm, peer, there, back)
    if there > 0:
        comm.send(peer, data[:there], counted=False).wait()
    comm.receive(peer, data[:back]).wait()
    return clock.now() - start


def _send(comm: Communicator, peer: int, there: int, back: int) -> None:
    """Tell a rank that runs `_follow` how many bytes come, and how many it is to send."""
    comm.send(peer, _numbers(there, back), counted=False).wait()


def _follow(comm: Communicator, peer: int, most_bytes: int) -> None:
    """Receive as many bytes as the peer says, and send as many as it asks for, until it stops."""
    data, numbers = np.ones(most_bytes, np.uint8), _numbers(0, 0)
    while True:
        comm.receive(peer, numbers).wait()
        there, back = numbers.view(np.int64).tolist()
        if there == _STOP:
            return
        if there > 0:
            comm.receive(peer, data[:there]).wait()
        sent = _numbers(*tcp_segments()) if there == _COUNT else data[:back]
        comm.send(peer, sent, counted=False).wait()


def _numbers(first: int, second: int) -> _Bytes:
    return np.array([first, second], np.int64).view(np.uint8)


def tcp_segments() -> tuple[int, int]:
    """Return the TCP segments that this host has sent, and sent again; 0 if unknown. Local."""
    try:
        text = Path("/proc/self/net/snmp").read_text()
        names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
        counts = dict(zip(names, values, strict=True))
        return int(counts["OutSegs"]), int(counts["RetransSegs"])
    except (OSError, ValueError, KeyError):
        return 0, 0
