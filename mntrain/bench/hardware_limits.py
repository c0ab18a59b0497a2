"""The bytes that a collective must send between nodes, and a short probe of the link."""

import time
from collections.abc import Sequence

import numpy as np

from mntrain.comm.mpi import Communicator, Requests
from mntrain.comm.topology import Topology

FIRST_BYTES, MOST_BYTES = 1 << 20, 64 << 20  # of messages that measure a link


def minimum_traffic(verb: str, ranks: Sequence[int]) -> float:
    """Return the fraction of the tensor that the busiest node must send or receive.

    `ranks` has the number of ranks on each node; every rank has a shard of the same length.
    """
    nodes = len(ranks)
    if verb == "all_reduce":
        return 2 * (nodes - 1) / nodes
    return float(nodes > 1) if verb == "broadcast" else 1 - min(ranks) / sum(ranks)


def link_speed(comm: Communicator, topology: Topology, seconds: float) -> float:
    """Return the payload bytes/s that a node sends and receives at once. Collective, blocking.

    The nodes, at least two, form a ring: as many ranks of each as the smallest one has send to the
    next node and receive from the previous one. Messages double until about `seconds` have passed,
    and the better of the last two counts, because buffers make short ones too fast. The result is
    the same on every rank.
    """
    node, lane = topology.node(comm.rank), topology.local_rank(comm.rank)
    lanes, nodes = topology.smallest_node, topology.nodes
    outgoing, incoming = np.ones((2, MOST_BYTES), dtype=np.uint8)
    nbytes, passed_s, took_s = FIRST_BYTES, 0.0, 0.0
    speeds: list[float] = []
    while passed_s + 2 * took_s < seconds:
        comm.gather(None)
        start = time.perf_counter()
        if lane < lanes:
            receive = comm.receive(nodes[node - 1][lane], incoming[:nbytes])
            send = comm.send(nodes[(node + 1) % len(nodes)][lane], outgoing[:nbytes])
            Requests.of(receive, send).wait()
        took_s = max(comm.gather(time.perf_counter() - start))
        passed_s += took_s
        speeds.append(lanes * nbytes / took_s)
        nbytes = min(2 * nbytes, MOST_BYTES)
    return max(speeds[-2:])
