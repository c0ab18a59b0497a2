"""How fast this machine is: its memory, and the link between its nodes.

Both probes are short; what is measured with them knows what it can hope for.
"""

import time
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from mntrain.comm.mpi import Communicator, Requests
from mntrain.comm.topology import Topology

PIECE_BYTES = 1 << 20
PIECES_IN_FLIGHT = 8
WARM_UP_BYTES = 1 << 20
SHORTEST_S = 1e-3  # of a round; shorter ones measure latency


def copy_speed(nbytes: int, seconds: float) -> float:
    """How fast a rank copies nbytes bytes from one place in host memory to another, in bytes/s.

    Local. The bytes are counted once, though they are read and written; the copy is torch's, on as
    many threads as torch has here. Called by all ranks of a node at once it measures what each has
    of the memory, and of the cores, that they share. As many copies as `seconds` hold, three at
    least, after one to warm up. Takes 2 * nbytes of memory meanwhile.
    """
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    target.copy_(source)
    copies, start = 0, time.perf_counter()
    while copies < 3 or time.perf_counter() - start < seconds:
        target.copy_(source)
        copies += 1
    return copies * nbytes / (time.perf_counter() - start)


def link_speed(comm: Communicator, topology: Topology, seconds: float) -> float:
    """Payload bytes/s that a node sends and at the same time receives. Collective, blocking.

    `comm` is the world of `topology`. The nodes stand in a ring: ranks of every node send to the
    next node while they receive from the one before, in pieces of which several are in flight.
    Once only the leaders do so and once all lanes do, where nodes have more than one rank; the
    better of the two counts. A round lasts until the slowest rank is done. Rounds double until
    about `seconds` have passed, and the better of the longest two counts: short ones would flatter
    a link whose buffers take a burst. The same number on every rank. Where there is a
    communication thread, call it there.

    Raises ValueError on a single node, which has no link.
    """
    nodes = topology.nodes
    if len(nodes) < 2:
        raise ValueError(f"{topology}: a single node has no link to measure")
    lanes = sorted({1, topology.smallest_node})
    return max(_ring_speed(comm, topology, count, seconds / len(lanes)) for count in lanes)


def _ring_speed(comm: Communicator, topology: Topology, lanes: int, seconds: float) -> float:
    """What `link_speed` measures, with so many lanes."""
    memory = np.ones((2, PIECES_IN_FLIGHT, PIECE_BYTES), dtype=np.uint8)
    start = time.perf_counter()
    _round(comm, topology, lanes, WARM_UP_BYTES, memory)
    nbytes, speeds = WARM_UP_BYTES, []
    while True:
        comm.gather_objects(None)
        mine = _round(comm, topology, lanes, nbytes, memory)
        both = comm.gather_objects((mine, time.perf_counter() - start))
        took, passed = max(float(took) for took, _ in both), float(both[0][1])
        speeds.append(lanes * nbytes / took)
        if took >= SHORTEST_S and passed + 2 * took > seconds:
            return max(speeds[-2:])
        nbytes *= 2


def _round(
    comm: Communicator, topology: Topology, lanes: int, nbytes: int, memory: NDArray[np.uint8]
) -> float:
    """Send and receive nbytes as a lane of the ring; the seconds until both are done.

    Ranks that are no lane do nothing. `memory` holds pieces to send and to fill.
    """
    node, lane = topology.node(comm.rank), topology.local_rank(comm.rank)
    if lane >= lanes:
        return 0.0
    following = topology.nodes[(node + 1) % len(topology.nodes)][lane]
    preceding = topology.nodes[node - 1][lane]
    outgoing, incoming = memory
    start = time.perf_counter()
    under_way: deque[tuple[Requests, Requests]] = deque()
    for index in range(nbytes // PIECE_BYTES):
        slot = index % PIECES_IN_FLIGHT
        if index >= PIECES_IN_FLIGHT:
            _wait(*under_way.popleft())
        under_way.append(
            (comm.receive(preceding, incoming[slot]), comm.send(following, outgoing[slot]))
        )
    for flights in under_way:
        _wait(*flights)
    return time.perf_counter() - start


def _wait(*flights: Requests) -> None:
    for flight in flights:
        flight.wait()
