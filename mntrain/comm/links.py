"""Latency and bandwidth between pairs of ranks.

Pairs are measured in rounds, as in a tournament: in each, every rank has at most one partner, and
disjoint pairs are measured at once. Each direction of a pair is timed alone. Source of the rounds:
the circle method (Kirkman, 1847).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from mntrain.comm.mpi import Communicator

_TRIPS = 20, 300  # round trips of a small message, at least and at most: 3 % loss show in 300
_ALL_TRIPS = 6000  # of a rank with all others, where there are many
_TRIPS_S = 2.0  # for those of a pair, which a link that loses messages takes long for
_SLOW_S, _SLOW = 0.1, 20  # of a slow round trip: seconds, and times the median
_WARM_BYTES = 64 << 10  # of a first message, which opens what large ones need
_FIRST_BYTES, _MOST_BYTES = 256 << 10, 4 << 20  # of messages for the bandwidth, which double
_LARGEST, _LEAST = 3, 3  # messages of the most bytes, and of all in a direction
_ROUND_S = 0.2  # the most for one round

T = TypeVar("T")


@dataclass(frozen=True)
class LinkSpeed:
    """The speed between two ranks, of which `one` is the lower. MB are 10^6 bytes."""

    one: int
    other: int
    latency_us: float  # half of a round trip of 16 bytes, the median
    mb_per_s_there: float  # from one to the other
    mb_per_s_back: float
    trips: int = 0  # round trips of a small message
    slow_trips: int = 0  # of these, those that took far longer than the median
    segments: int = 0  # TCP segments that both hosts have sent meanwhile; 0 if unknown
    resent: int = 0  # of these, those that were sent again, since they were lost

    @property
    def mb_per_s(self) -> float:
        """The mean of both directions, for equal bytes each way."""
        return 2 / (1 / self.mb_per_s_there + 1 / self.mb_per_s_back)


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
    at_round: Callable[[], None] = lambda: None,
) -> list[LinkSpeed]:
    """Return the speed of every pair of ranks in each group, sorted. Collective.

    Groups are disjoint and measured at once, for at most about `seconds`; slow links take longer.
    With `most_rounds`, each rank is measured with so many others only. Messages have `most_bytes`
    at most. `at_round` is called before each round. The result is the same on every rank.
    """
    plans = [list(islice(rounds(sorted(group)), most_rounds)) for group in groups]
    count = max((len(plan) for plan in plans), default=0)
    found: list[LinkSpeed] = []
    for number in range(count):
        comm.gather_objects(None)  # a barrier, in which the other ranks sleep
        at_round()
        pairs = [pair for plan in plans if number < len(plan) for pair in plan[number]]
        for one, other in (sorted(pair) for pair in pairs):
            if comm.rank == one:
                trips = max(_TRIPS[0], min(_TRIPS[1], _ALL_TRIPS // count))
                lead = _Lead(comm, other, most_bytes)
                found.append(lead.measure(trips, min(_ROUND_S, seconds / count)))
            elif comm.rank == other:
                _follow(comm, one)
    gathered = [link for links in comm.gather_objects(found) for link in links]
    return sorted(gathered, key=lambda link: (link.one, link.other))


class _Order(IntEnum):
    """Orders of the lower rank of a pair to the other one."""

    STOP = 0
    ANSWER = 1  # with a small message
    RECEIVE = 2  # some bytes, and answer
    SEND = 3  # some bytes
    COUNT = 4  # the TCP segments since the first order


class _Lead:
    """The lower rank of a pair, which measures the link to one that runs `_follow`."""

    def __init__(self, comm: Communicator, peer: int, most_bytes: int) -> None:
        self._comm, self._peer, self._most_bytes = comm, peer, most_bytes
        self._data = np.ones(max(most_bytes, _WARM_BYTES), np.uint8)

    def measure(self, most_trips: int, seconds: float) -> LinkSpeed:
        """Measure the latency, then each direction for half of the seconds."""
        before, start = tcp_segments(), time.perf_counter()
        times = [self._trip()]  # which may connect
        while len(times) <= most_trips and time.perf_counter() < start + _TRIPS_S:
            times.append(self._trip())
        after = tcp_segments()
        theirs = self._ask(_Order.COUNT)
        usual = median(times[1:] or times)
        there = self._rate(self._send, usual, seconds / 2)
        back = self._rate(self._receive, usual, seconds / 2)
        self._order(_Order.STOP)
        return LinkSpeed(
            self._comm.rank,
            self._peer,
            usual / 2 * 1e6,
            there,
            back,
            trips=len(times) - 1,
            slow_trips=sum(took > max(_SLOW_S, _SLOW * usual) for took in times[1:]),
            segments=after[0] - before[0] + theirs[0],
            resent=after[1] - before[1] + theirs[1],
        )

    def _rate(self, transfer: Callable[[int], None], trip_s: float, seconds: float) -> float:
        """Return the MB/s of transfers in one direction."""
        speeds: list[float] = []
        start, nbytes, largest = time.perf_counter(), _WARM_BYTES, 0
        while largest < _LARGEST:
            before = time.perf_counter()
            transfer(nbytes)
            took_s = time.perf_counter() - before
            # A message that takes as long as is allowed is long enough; another program may have
            # held up a single one.
            enough = took_s > seconds
            if nbytes > _WARM_BYTES or enough:
                speeds.append(nbytes / max(took_s - trip_s, took_s / 2) / 1e6)
            left_s = seconds - (time.perf_counter() - start)
            if left_s < 2 * took_s and len(speeds) >= _LEAST:
                break
            largest += nbytes == self._most_bytes
            if not enough:
                nbytes = min(max(2 * nbytes, _FIRST_BYTES), self._most_bytes)
        return max(speeds[-_LEAST + 1 :])

    def _send(self, nbytes: int) -> None:
        self._order(_Order.RECEIVE, nbytes)
        self._comm.send(self._peer, self._data[:nbytes], counted=False).wait()
        self._comm.receive(self._peer, _numbers().view(np.uint8)).wait()

    def _receive(self, nbytes: int) -> None:
        self._order(_Order.SEND, nbytes)
        self._comm.receive(self._peer, self._data[:nbytes]).wait()

    def _trip(self) -> float:
        start = time.perf_counter()
        self._ask(_Order.ANSWER)
        return time.perf_counter() - start

    def _ask(self, order: _Order) -> tuple[int, int]:
        self._order(order)
        numbers = _numbers()
        self._comm.receive(self._peer, numbers.view(np.uint8)).wait()
        return int(numbers[0]), int(numbers[1])

    def _order(self, order: _Order, nbytes: int = 0) -> None:
        self._comm.send(self._peer, _numbers(order, nbytes).view(np.uint8), counted=False).wait()


def _follow(comm: Communicator, peer: int) -> None:
    """Follow the orders of the peer until it stops."""
    segments, resent = tcp_segments()
    data = np.ones(_WARM_BYTES, np.uint8)
    while True:
        numbers = _numbers()
        comm.receive(peer, numbers.view(np.uint8)).wait()
        order, nbytes = _Order(int(numbers[0])), int(numbers[1])
        answer = _numbers()
        if nbytes > data.nbytes:
            data = np.ones(nbytes, np.uint8)
        match order:
            case _Order.STOP:
                return
            case _Order.SEND:
                comm.send(peer, data[:nbytes], counted=False).wait()
                continue
            case _Order.RECEIVE:
                comm.receive(peer, data[:nbytes]).wait()
            case _Order.COUNT:
                now = tcp_segments()
                answer = _numbers(now[0] - segments, now[1] - resent)
        comm.send(peer, answer.view(np.uint8), counted=False).wait()


def _numbers(first: int = 0, second: int = 0) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
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
