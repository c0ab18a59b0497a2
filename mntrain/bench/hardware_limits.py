"""The time that the hardware allows for a collective, and short probes of its speed."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mntrain.bench.bench_options import VERBS
from mntrain.comm.mpi import Communicator, Requests
from mntrain.comm.topology import Topology

FIRST_BYTES, MOST_BYTES = 1 << 20, 64 << 20  # of messages that measure a link


@dataclass(frozen=True)
class HardwareLimits:
    """Measured speeds in bytes/s, the same on every rank."""

    ranks: tuple[int, ...]  # number of ranks on each node
    link: float | None  # of a node that sends and receives at once; None on a single node
    copy: Mapping[int, float]  # by size: of the slowest rank while all ranks copy at once

    def seconds(self, verb: str, nbytes: int) -> float:
        """Return the limit for a collective on a tensor of `nbytes` bytes.

        Between nodes: the bytes that some node must send or receive, over the link's speed. Within
        one node: the time in which all ranks at once copy the tensor, which a collective may beat
        if each rank touches only a part of it.
        """
        if self.link is None:
            return nbytes / self.copy[nbytes]
        return minimum_traffic(verb, self.ranks) * nbytes / self.link

    @property
    def description(self) -> str:
        """The limit in words."""
        if self.link is None:
            return (
                "the time of a copy of the tensor in this node's memory while all ranks copy at "
                "once; a collective that touches less of it may be faster"
            )
        bytes_of = (f"{verb} {minimum_traffic(verb, self.ranks):.3g} S" for verb in VERBS)
        return (
            "the bytes that a node must send or receive, over the speed of the measured link; for "
            f"S bytes: {', '.join(bytes_of)}"
        )


def minimum_traffic(verb: str, ranks: Sequence[int]) -> float:
    """Return the fraction of the tensor that the busiest node must send or receive.

    `ranks` has the number of ranks on each node; every rank has a shard of the same length.
    """
    nodes = len(ranks)
    if verb == "all_reduce":
        return 2 * (nodes - 1) / nodes
    return float(nodes > 1) if verb == "broadcast" else 1 - min(ranks) / sum(ranks)


def copy_speed(nbytes: int, seconds: float) -> float:
    """Return the speed of copies of `nbytes` bytes in host memory, in bytes/s. Local.

    Each byte counts once, though it is read and written. Called by all ranks of a node together, it
    measures each rank's share of their memory. Makes as many copies as fit into `seconds`, at
    least three, after a warm-up.
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
