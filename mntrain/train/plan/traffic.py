"""The bytes that a step sends, within and between nodes. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from mntrain import compression
from mntrain.comm import algorithms, world_collectives
from mntrain.comm.topology import Topology
from mntrain.options.config import CommConfig
from mntrain.ranks import TRAVEL_DTYPES
from zero.comm_hooks.between_nodes import Int8Hook
from zero.comm_hooks.codes import Code, aligned
from zero.layout import Bucket


class SentBytes(NamedTuple):
    """Bytes that all ranks together send, as they are counted: see docs/metrics.md."""

    node: float  # within nodes
    cross: float  # between them


def collective(
    verb: str, bucket: Bucket, topology: Topology, algorithm: str, *, itemsize: int, wire: int
) -> SentBytes:
    """Return what a collective on a bucket in shared memory sends.

    `verb` is all_reduce, reduce_scatter or all_gather; elements have `itemsize` bytes, and `wire`
    bytes between nodes. By "lanes" and "leader", which send nodes equally much: every node's sum of
    an element goes once to the node that adds it, and the result once to every other node, which
    the owner of a lane reads and writes in the memory of its node's ranks.
    """
    size, halves = bucket.numel * itemsize, 2 if verb == "all_reduce" else 1
    if size * topology.size <= world_collectives.SMALL_MESSAGE_BYTES:  # every rank gathers them
        return _by_messages(verb, size, topology, "naive")
    if algorithm not in ("lanes", "leader"):
        return _by_messages(verb, bucket.numel * min(itemsize, wire), topology, algorithm)
    within = halves * size * sum(len(node) - 1 for node in topology.nodes)
    if verb == "reduce_scatter":  # the shards of ranks that own no lane are written to them
        lanes = topology.smallest_node if algorithm == "lanes" else 1
        owned = [bucket.shard(topology.slots[r]) for n in topology.nodes for r in n[lanes:]]
        within += itemsize * sum(high - low for low, high in owned)
    return SentBytes(within, halves * (len(topology.nodes) - 1) * bucket.numel * wire)


def _by_messages(verb: str, nbytes: int, topology: Topology, algorithm: str) -> SentBytes:
    """Return what an algorithm sends in which every rank is a node of its own."""
    ranks, halves = range(topology.size), 2 if verb == "all_reduce" else 1
    if algorithm == "naive":  # every rank sends all to every other
        parts = [(one, other, 1.0) for one in ranks for other in ranks if one != other]
    else:
        plans = [algorithms.load(algorithm).plan(topology, rank) for rank in ranks]
        parts = [
            (rank, other, halves * plan.widths[level + 1] / topology.size)
            for rank, plan in enumerate(plans)
            for level in range(len(plan.widths) - 1)
            for other in plan.partners(level)
        ]
    within = sum(part for a, b, part in parts if topology.node(a) == topology.node(b))
    total = sum(part for _, _, part in parts)
    return SentBytes(nbytes * within, nbytes * (total - within))


def step(
    plan: Sequence[Bucket], stage: int, topology: Topology, comm: CommConfig, micro_batches: int
) -> SentBytes:
    """Return what the gradients and parameters of a step send.

    A rank has so many `micro_batches` in a step; at stage 2 the gradients of each are sent.
    """
    hook = compression.select_hook(comm.compress, None)
    code = hook.code if isinstance(hook, Int8Hook) and len(topology.nodes) > 1 else None
    times = micro_batches if stage == 2 else 1
    node = cross = 0.0
    for bucket in plan:
        itemsize = bucket.dtype.itemsize
        wire, gathered = (
            min(itemsize, dtype.itemsize) if (dtype := TRAVEL_DTYPES[name]) else itemsize
            for name in (comm.wire_dtype, comm.gather_dtype)
        )
        calls = [("reduce_scatter", itemsize, wire, times), ("all_gather", gathered, gathered, 1)]
        for verb, own, between, count in calls if stage else [("all_reduce", itemsize, wire, 1)]:
            if code is not None and verb != "all_gather":
                sent = _coded(verb, bucket, topology, code)
            else:
                name = comm.algorithm
                sent = collective(verb, bucket, topology, name, itemsize=own, wire=between)
            node += sent.node * count
            cross += sent.cross * count
    return SentBytes(node, cross)


def _coded(verb: str, bucket: Bucket, topology: Topology, code: Code) -> SentBytes:
    """Return what is sent if the owner of a lane sends its node's sum to every other as a code."""
    nodes = len(topology.nodes)
    unequal = len(set(map(len, topology.nodes))) > 1  # then shards lie on other ranks than lanes
    halves = 2 if verb == "all_reduce" or unequal else 1
    cuts = [bucket.bounds[slot] for slot in topology.lane_slots]
    codes = sum(aligned(code.nbytes(high - low)) for low, high in pairwise(cuts) if low < high)
    within = sum(halves * (len(node) - 1) * bucket.nbytes for node in topology.nodes)
    return SentBytes(within, nodes * (nodes - 1) * codes)
