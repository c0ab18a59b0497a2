"""The link between two nodes, from which lengths of chunks follow. Measured, or given.

What follows from it is rounded to powers of two, so that noise of the measurement rarely changes
it. No sum depends on it: wherever a tensor is cut, its elements are summed in the same order.
"""

import math
import re
from dataclasses import dataclass
from statistics import median

import numpy as np

from mntrain.comm import clock
from mntrain.comm.mpi import Communicator
from mntrain.comm.topology import Topology

_UNITS = {"us": 1e-6, "ms": 1e-3, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
_TRIPS = 8  # of each length, of which the fastest counts: another program may delay some
_BYTES = 256 << 10  # of a long message
_PATIENCE_S = 0.01  # after which no more trips begin: a slow link needs no exact figures


@dataclass(frozen=True)
class Link:
    """Seconds of a message without content from rank to rank, and the bytes per second."""

    latency_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, text: str) -> "Link":
        """Return the link of words such as "100gbit,5us". Raises ValueError for others."""
        number = r"(\d+(?:\.\d+)?)"
        found = re.fullmatch(rf"{number}([mg]bit),{number}([um]s)", text.lower())
        values = [float(found[1]), float(found[3])] if found else []
        if found is None or 0 in values:
            raise ValueError("must be a rate and a latency, such as 100gbit,5us")
        return cls(values[1] * _UNITS[found[4]], values[0] * _UNITS[found[2]])

    def bytes_during(self, messages: float) -> float:
        """Return the bytes that pass while so many short messages do, one after the other."""
        return messages * self.latency_s * self.bytes_per_s


def power_of_two(number: float) -> int:
    """Return the largest power of two that is no larger; of a number below 1 one, and of 0 none."""
    return 1 << max(0, math.floor(math.log2(number))) if number else 0


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
            found = _lead(comm, other)
        elif comm.rank == other:
            _follow(comm, one)
    links = [link for link in comm.gather(found) if link is not None]
    latencies, rates = zip(*((link.latency_s, link.bytes_per_s) for link in links), strict=True)
    return Link(median(latencies), median(rates))


def _lead(comm: Communicator, peer: int) -> Link:
    """Measure the link to a rank that runs `_follow`."""
    order, answer, data = np.ones(1, np.uint8), np.zeros(1, np.uint8), np.zeros(_BYTES, np.uint8)

    def trip_s(content: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> float:
        """Return the seconds of the fastest of some messages with their answers."""
        times: list[float] = []
        begun_s = clock.now()
        while len(times) < _TRIPS and (len(times) < 2 or clock.now() < begun_s + _PATIENCE_S):
            start_s = clock.now()
            order[0] = len(content) > 1
            comm.send(peer, order, counted=False).wait()
            if len(content) > 1:
                comm.send(peer, content, counted=False).wait()
            comm.receive(peer, answer).wait()
            times.append(clock.now() - start_s)
        return min(times)

    short_s, long_s = trip_s(order), trip_s(data)
    order[0] = _STOP
    comm.send(peer, order, counted=False).wait()
    return Link(short_s / 2, _BYTES / max(long_s - short_s, long_s / 8))


def _follow(comm: Communicator, peer: int) -> None:
    """Answer the messages of a rank that runs `_lead`, until it stops."""
    order, data = np.zeros(1, np.uint8), np.zeros(_BYTES, np.uint8)
    while True:
        comm.receive(peer, order).wait()
        if order[0] == _STOP:
            return
        if order[0]:
            comm.receive(peer, data).wait()
        comm.send(peer, order, counted=False).wait()


_STOP = 2
