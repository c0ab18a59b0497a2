"""Short probes of the hardware limits: memory copies, and the link between nodes."""

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
    """Return the speed of copies of `nbytes` bytes in host memory, in bytes/s. Local.

    Each byte counts once, though it is read and written. torch copies, on its threads. Called by
    all ranks of a node together, it measures each rank's share of their memory and cores. Makes as
    many copies as fit into `seconds`, three at least, after a warm-up. Uses 2 * nbytes of memory.
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
    """Return the payload bytes/s that a node sends and receives at once. Collective, blocking.

    `comm` is the communicator of `topology`. The nodes form a ring: ranks of each node send to the
    next node and receive from the previous one, with several messages in flight. The leaders alone
    are measured, and all lanes where nodes have more than one rank; the better result counts. A
    round ends with its slowest rank. Rounds double until about `seconds` have passed, and the
    better of the last two counts: buffers would make short ones too fast. The result is the same on
    every rank. Where there is a communication thread, call it there.

    Raises ValueError on a single node, which has no link.
    """
    nodes = topology.nodes
    if len(nodes) < 2:
        raise ValueError(f"{topology}: a single node has no link to measure")
    lanes = sorted({1, topology.smallest_node})
    return max(_ring_speed(comm, topology, count, seconds / len(lanes)) for count in lanes)


def _ring_speed(comm: Communicator, topology: Topology, lanes: int, seconds: float) -> float:
    """Return the speed of `link_speed` with `lanes` ranks per node."""
    memory = np.ones((2, PIECES_IN_FLIGHT, PIECE_BYTES), dtype=np.uint8)
    start = time.perf_counter()
    _round(comm, topology, lanes, WARM_UP_BYTES, memory)
    nbytes, speeds = WARM_UP_BYTES, []
    while True:
        comm.gather_objects(None)
        local_s = _round(comm, topology, lanes, nbytes, memory)
        by_rank = comm.gather_objects((local_s, time.perf_counter() - start))
        took, passed = max(float(took) for took, _ in by_rank), float(by_rank[0][1])
        speeds.append(lanes * nbytes / took)
        if took >= SHORTEST_S and passed + 2 * took > seconds:
            return max(speeds[-2:])
        nbytes *= 2


def _round(
    comm: Communicator, topology: Topology, lanes: int, nbytes: int, memory: NDArray[np.uint8]
) -> float:
    """Send and receive `nbytes` as one lane of the ring, and return the seconds it takes.

    Ranks without a lane do nothing. `memory` holds the pieces to send and to receive.
    """
    node, lane = topology.node(comm.rank), topology.local_rank(comm.rank)
    if lane >= lanes:
        return 0.0
    following = topology.nodes[(node + 1) % len(topology.nodes)][lane]
    preceding = topology.nodes[node - 1][lane]
    outgoing, incoming = memory
    start = time.perf_counter()
    in_flight: deque[tuple[Requests, Requests]] = deque()
    for index in range(nbytes // PIECE_BYTES):
        slot = index % PIECES_IN_FLIGHT
        if index >= PIECES_IN_FLIGHT:
            _wait(*in_flight.popleft())
        in_flight.append(
            (comm.receive(preceding, incoming[slot]), comm.send(following, outgoing[slot]))
        )
    for pair in in_flight:
        _wait(*pair)
    return time.perf_counter() - start


def _wait(*pairs: Requests) -> None:
    for requests in pairs:
        requests.wait()
