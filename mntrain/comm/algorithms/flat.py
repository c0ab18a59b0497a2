"""Flat: one level of point-to-point messages between all ranks, as if each were a node."""

from mntrain.comm.chunk_plan import HierarchyPlan
from mntrain.comm.topology import Topology


def plan(topology: Topology, rank: int) -> HierarchyPlan:
    """Return the plan of one node per rank and one lane."""
    single_ranks = Topology(tuple((rank,) for rank in range(topology.size)))
    return HierarchyPlan(single_ranks, 1, topology.slots, rank)
