"""Flat: one level of point-to-point messages between all ranks, as if each were a node."""

from functools import partial

from mntrain.comm.chunk_plan import HierarchyPlan
from mntrain.comm.hierarchical import run_hierarchical
from mntrain.comm.resources import Algorithm
from mntrain.comm.topology import Topology

HOST_ONLY = False


def plan(topology: Topology, rank: int) -> HierarchyPlan:
    """Return the plan of one node per rank and one lane."""
    single_ranks = Topology(tuple((rank,) for rank in range(topology.size)))
    return HierarchyPlan(single_ranks, 1, topology.slots, rank)


def make(topology: Topology, rank: int) -> Algorithm:
    """Return the algorithm for a rank."""
    return partial(run_hierarchical, plan(topology, rank))
