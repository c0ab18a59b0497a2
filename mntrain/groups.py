"""Parts of a world: collectives over node and cross groups, and the links between nodes."""

from typing import Literal

from mntrain.bootstrap import WorldParts
from mntrain.comm import mpi
from mntrain.comm.collectives import Transport, WorldCollectives
from mntrain.comm.links import measure
from mntrain.comm.topology import Topology
from zero.comm_hooks.node_levels import NodeLevels

_LINK_ROUNDS = 3  # in each, a node is measured with one other
_LINKS_S = 0.6
_LINK_BYTES = 512 << 10  # of the largest messages


def make_group_collectives(
    parts: WorldParts, level: Literal["node", "cross"], user: str = ""
) -> WorldCollectives:
    """Make collectives over this rank's node or cross group. Collective over the world.

    All messages count for `level`. Tensors on GPUs are staged in host memory where the world's go
    through NCCL. The node group has the world's shared memory. `user` names what the collectives
    are for, the same on all ranks, if they are not the world's own.
    """
    rank, topology, engine = parts.comm.rank, parts.topology, parts.engine
    group = topology.node_group(rank) if level == "node" else topology.cross_group(rank)
    ranks = tuple(range(len(group)))
    own = Topology((ranks,) if level == "node" else tuple((r,) for r in ranks))
    choice, selected = parts.collectives.choice, parts.collectives.transport
    transport: Transport = "host" if selected == "nccl" else selected

    def split(color: int, name: str) -> mpi.Communicator:
        comm = parts.comm.split(color, group.index(rank), name)
        parts.groups.callback(comm.free)
        return comm

    def make() -> WorldCollectives:
        node = parts.node if level == "node" else split(rank, "self")
        comm = split(group[0], f"{level} group")
        comm.traffic, comm.levels = parts.comm.traffic, [level] * comm.size
        name = f"the {level} group of rank {group[0]}{user and f' of {user}'}"
        stream = engine.add_stream(name, group)
        return WorldCollectives(
            comm,
            node,
            own,
            engine,
            parts.devices,
            stream=stream,
            choice=choice,
            transport=transport,
            shares=parts.collectives if level == "node" else None,
        )

    return parts.collectives.call_together(make, f"world.{level}_collectives").wait()


def make_node_levels(parts: WorldParts, user: str) -> NodeLevels:
    """Make the node group and the cross group of a communication hook. Collective over the world.

    `user` names the optimizer.
    """
    rank, topology = parts.comm.rank, parts.topology
    node = make_group_collectives(parts, "node", user)
    cross = make_group_collectives(parts, "cross", user)
    choice = cross.choice.among_others()
    return NodeLevels(
        node.replace(choice=choice),
        cross.replace(choice=choice),
        topology.nodes,
        topology.lane_slots,
        topology.node_slots(rank),
    )


def measure_node_links(parts: WorldParts) -> list[float]:
    """Return the bytes/s that each node exchanges with another; [] on one node. Collective.

    Leaders send each other messages, one at a time; a node's link counts as fast as with the best
    of up to three partners. Takes at most about 0.6 s, longer on slow links. The same on all ranks.
    """
    nodes, rank = parts.topology.nodes, parts.comm.rank
    if len(nodes) == 1:
        return []
    leaders = [node[0] for node in nodes]

    def run() -> list[float]:
        comm = parts.comm.split(0, rank, "links")
        found = measure(comm, [leaders], _LINKS_S, most_rounds=_LINK_ROUNDS, most_bytes=_LINK_BYTES)
        comm.free()
        return [
            1e6 * max(link.mb_per_s for link in found if leader in (link.one, link.other))
            for leader in leaders
        ]

    return parts.collectives.call_together(run, "measurement of the links between nodes").wait()
