"""Lanes: ranks of a node share memory; each exchanges a part of the tensor with other nodes."""

from mntrain.comm.chunk_plan import HierarchyPlan
from mntrain.comm.topology import Topology


def plan(topology: Topology, rank: int) -> HierarchyPlan:
    """Return the plan of as many lanes as the smallest node has ranks."""
    return HierarchyPlan(topology, topology.smallest_node, topology.slots, rank)
