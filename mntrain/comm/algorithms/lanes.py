"""Lanes: ranks of a node share memory; each exchanges a part of the tensor with other nodes."""

from mntrain.comm.chunk_plan import HierarchyPlan
from mntrain.comm.chunked import HierarchicalAlgorithm
from mntrain.comm.collective_call import Algorithm, WorldContext
from mntrain.comm.topology import Topology

AUTO = True


def plan(topology: Topology, rank: int) -> HierarchyPlan:
    """Return the plan of as many lanes as the smallest node has ranks."""
    return HierarchyPlan(topology, topology.smallest_node, topology.slots, rank)


def make(world: WorldContext) -> Algorithm:
    """Return the algorithm for a world."""
    return HierarchicalAlgorithm(world, plan(world.topology, world.comm.rank))
