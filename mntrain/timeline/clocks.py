"""The clock of rank 0, as another rank computes it from its own.

Rank 0 asks every other rank for the time. Of several round trips, the shortest bounds the
difference of two clocks best: by half of what it takes. Between two readings, clocks drift evenly.

Source: Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mntrain.comm.mpi import Communicator

TRIPS = 30  # round trips to each rank


class ClockReading(NamedTuple):
    """One moment by the clocks of this rank and of rank 0, in seconds of `time.perf_counter`."""

    own: float
    master: float  # of rank 0
    error: float  # the most by which `master` may be wrong


def read_clocks(comm: Communicator) -> ClockReading:
    """Return a reading of this rank's clock and that of rank 0. Collective, blocking."""
    reply = np.zeros(1)
    data, readings = reply.view(np.uint8), [ClockReading(now := time.perf_counter(), now, 0.0)]
    if comm.rank:
        for _ in range(TRIPS):
            comm.receive(0, data).wait()
            reply[0] = time.perf_counter()
            comm.send(0, data, counted=False).wait()
    else:
        readings += [_ask(comm, peer, reply) for peer in range(1, comm.size)]
    of_rank_0: list[ClockReading] = comm.gather(readings)[0]
    return of_rank_0[comm.rank]


def _ask(
    comm: Communicator, peer: int, reply: "np.ndarray[tuple[int], np.dtype[np.float64]]"
) -> ClockReading:
    """Return the best reading of a peer's clock."""
    data, trips = reply.view(np.uint8), []
    for _ in range(TRIPS):
        start = time.perf_counter()
        comm.send(peer, data, counted=False).wait()
        comm.receive(peer, data).wait()
        end = time.perf_counter()
        trips.append((end - start, (start + end) / 2, float(reply[0])))
    trip_s, master, own = min(trips)
    return ClockReading(own, master, trip_s / 2)


def to_master(first: ClockReading, last: ClockReading) -> Callable[[float], float]:
    """Return the function from a time of this rank's clock to that of rank 0. Pure."""
    passed = last.own - first.own
    rate = (last.master - first.master) / passed if passed > 0 else 1.0
    return lambda own: first.master + (own - first.own) * rate
