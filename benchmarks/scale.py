"""Simulate collectives on up to 1,024 nodes, in virtual time, beside a bound.

    python benchmarks/scale.py

Ranks of nodes of one, four and eight run in this process (tests/simulation), without MPI, root or a
network, on one core in under ten minutes. Writes docs/results/scale.md: the virtual time of
collectives, from the moment at which all ranks call them, and what the busiest rank sends. Every
rank's result is checked.
"""

import argparse
import gc
import math
import sys
import time
from typing import Any, NamedTuple

from results import DOCS, MIB, facts, heading, size_label, table, write


class Link(NamedTuple):
    """A kind of link."""

    name: str
    latency_s: float
    rate: float  # bytes per second


SLOW = Link("1 Gbit/s, 50 us", 50e-6, 0.125e9)
MIDDLE = Link("100 Gbit/s, 5 us", 5e-6, 12.5e9)
FAST = Link("400 Gbit/s, 2 us", 2e-6, 50e9)
MESSAGE_S = 1e-6
BUCKET_KIB = 25 * 1024
VERBS = {
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "broadcast": "broadcast",
}
# The nodes of each size of tensor in KiB, by link and ranks of a node: those that one process
# simulates in minutes.
ALL_REDUCES = {
    (MIDDLE, 1): {
        1: (2, 16, 256),
        64: (2, 16, 256, 1024),
        1024: (2, 16, 64),
        BUCKET_KIB: (2, 4, 16),
    },
    (MIDDLE, 4): {
        1: (2, 16, 64),
        64: (2, 16, 64, 256),
        1024: (2, 16, 64),
        BUCKET_KIB: (2, 4, 16),
    },
    (MIDDLE, 8): {1: (2, 16), 64: (2, 16, 64), 1024: (2, 16), BUCKET_KIB: (2,)},
    (SLOW, 4): {1: (4, 64), 64: (4, 64), 1024: (4,), BUCKET_KIB: (4,)},
    (FAST, 4): {1: (4, 64), 64: (4, 64), 1024: (4, 64), BUCKET_KIB: (4, 16)},
}
OTHERS = {
    (MIDDLE, 4): {64: (16, 64), 1024: (16, 64), BUCKET_KIB: (16,)},
    (MIDDLE, 8): {64: (16,), 1024: (16,)},
    (SLOW, 4): {64: (16,), 1024: (16,)},
    (FAST, 4): {64: (16,), 1024: (16,), BUCKET_KIB: (16,)},
}
# Calls of which one lane of four is simulated, over a quarter of the link.
LARGE_KIB = 256 * 1024
LANES = {
    "all_reduce": {
        64: (16, 64, 256, 1024),
        1024: (16, 64, 256, 1024),
        BUCKET_KIB: (4, 16, 1024),
        LARGE_KIB: (2, 4, 16),
    },
    "reduce_scatter": {1024: (16, 1024), LARGE_KIB: (4,)},
    "all_gather": {1024: (16, 1024), LARGE_KIB: (4,)},
    "broadcast": {1024: (16, 1024), LARGE_KIB: (4,)},
}
SAME = ("verb", "nodes", "per_node", "kib", "link")  # of a lane's run and that of all lanes
LEFT_OUT = """
The time to add, to copy and to read shared memory; everything that a computer does beside
the call, such as computing and its own threads; packets and their loss, and switches, which carry
everything at once. A message takes 1 us of its sender's CPU and 1 us of its receiver's. Up to 64
KiB it is sent at once, and a longer one when the receiver has answered. MPI makes progress without
being called, and a rank that waits sees a message when it arrives: it does not sleep meanwhile. So
these are times that the order and sizes of messages allow, not those of a machine.

Not simulated, since one process has not the time or the memory: all lanes of 64 KiB on more than
256 nodes, of 25 MiB on more than 16 and of 256 MiB; 256 MiB on more than 16 nodes; nodes of eight
ranks on more than 64; and 256 MiB and nodes of eight over links of 1 and 400 Gbit/s.
"""
ONE_LANE = """
On nodes of four ranks, each rank exchanges its lane of a tensor with one rank of every other node,
and the lanes share the links. Here the ranks of one lane alone are simulated, with a quarter of the
tensor, over links of a quarter of the rate. That leaves out the node's own steps, and what lanes do
to each other: that each waits while a message of another one passes, or has the whole link while
the others have nothing to send. The last column but one is the time of all four lanes, where they
are simulated above.
"""


def main() -> None:
    """Simulate every layout and size, and write the page."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    for name in ("simulation", "helpers", "mpi"):
        sys.path.append(str(DOCS.parent / "tests" / name))
    page = facts()
    runs = [
        collective("all_reduce", nodes, per_node, kib, link)
        for (link, per_node), sizes in ALL_REDUCES.items()
        for kib, counts in sizes.items()
        for nodes in counts
    ]
    runs += [
        collective(verb, nodes, per_node, kib, link)
        for (link, per_node), sizes in OTHERS.items()
        for verb in [*VERBS][1:]
        for kib, counts in sizes.items()
        for nodes in counts
    ]
    runs += [
        collective(verb, nodes, 4, kib, MIDDLE, lane=True)
        for verb, sizes in LANES.items()
        for kib, counts in sizes.items()
        for nodes in counts
    ]
    page |= {"runs": runs, "versions": versions(), "took_s": round(time.process_time())}
    publish(page, "scale", DOCS)


def versions() -> dict[str, str]:
    """Return the versions on which the messages depend."""
    import torch  # noqa: PLC0415 - not needed to write the page

    from mntrain import __version__  # noqa: PLC0415 - as above

    return {"mntrain": __version__, "torch": torch.__version__}


def collective(
    verb: str,
    nodes: int,
    per_node: int,
    kib: int,
    link: Link,
    *,
    lane: bool = False,
) -> dict[str, Any]:
    """Call a collective on fp32 over all ranks; return the virtual seconds, and what ranks send.

    With `lane`, over the ranks of one lane, with their part of the tensor and of each link. The
    library knows the link as it would measure it.
    """
    import torch  # noqa: PLC0415 - not needed to write the page
    from network import Link as SimulatedLink  # noqa: PLC0415 - as above
    from network import NetworkModel  # noqa: PLC0415 - as above
    from simulated_ranks import Rank, SimulatedRanks  # noqa: PLC0415 - as above

    from mntrain.comm import chunk_plan  # noqa: PLC0415 - as above
    from mntrain.comm import link as links  # noqa: PLC0415 - as above
    from mntrain.comm.ticket import AlgorithmChoice  # noqa: PLC0415 - as above

    torch.set_num_threads(1)
    lanes, ranks_of_node = (per_node, 1) if lane else (1, per_node)
    length, size = (kib << 8) // lanes, nodes * ranks_of_node
    total = torch.full((length,), sum(rank % 3 for rank in range(size)), dtype=torch.float32)

    def program(rank: Rank) -> tuple[float, ...]:
        own = rank.collectives.slot(rank.rank)
        shard = slice(own * length // size, (own + 1) * length // size)
        if verb in ("all_reduce", "reduce_scatter"):
            tensor = torch.full_like(total, rank.rank % 3)
        elif verb == "all_gather" or rank.rank == 0:
            tensor = total.clone()
        else:
            tensor = torch.zeros_like(total)
        if verb == "all_gather":
            tensor[: shard.start] = tensor[shard.stop :] = 0.0
        job, at, rank.engine.stepped = rank.ranks.job, rank.rank, True
        rank.comm.as_mpi4py.Barrier()
        messages, sent, begun_s = job.messages[at], job.bytes[at], rank.ranks.time.local_now()
        job.peers[at].clear()
        getattr(rank.collectives, verb)(tensor).wait()
        ended_s = rank.ranks.time.local_now()
        mine = shard if verb == "reduce_scatter" else slice(None)
        assert torch.equal(tensor[mine], total[mine])
        counts = job.messages[at] - messages, job.bytes[at] - sent, len(job.peers[at])
        return begun_s, ended_s, *counts, rank.comm.traffic.buffer_bytes

    between = SimulatedLink(link.latency_s, link.rate / lanes)
    known = links.Link(link.latency_s + 2 * MESSAGE_S, between.rate)
    ranks = SimulatedRanks(
        [ranks_of_node] * nodes,
        network=NetworkModel(between=between, message_s=MESSAGE_S),
        choice=AlgorithmChoice("lanes", link=known),
        watched=False,
        threads=False,
        switches=0,
    )
    gc.collect()
    gc.disable()  # it would look at millions of objects again and again
    in_flight = chunk_plan.CHUNKS_IN_FLIGHT
    if lane and nodes > 2 and verb != "broadcast":  # as of each lane of several
        chunk_plan.CHUNKS_IN_FLIGHT = chunk_plan.CROWDED_CHUNKS_IN_FLIGHT
    try:
        begins, ends, messages, sent, peers, buffers = zip(*ranks.run(program), strict=True)
    finally:
        chunk_plan.CHUNKS_IN_FLIGHT = in_flight
        gc.enable()
    print(f"{verb}, {nodes} nodes of {per_node}, {kib} KiB, {link.name}", file=sys.stderr)
    return {
        "verb": verb,
        "nodes": nodes,
        "per_node": per_node,
        "kib": kib,
        "link": link.name,
        "lane": lane,
        "seconds": max(ends) - max(begins),
        "messages": max(messages),
        "bytes": max(sent),
        "peers": max(peers),
        "buffer_bytes": max(buffers),
    }


def publish(page: dict[str, Any], name: str, output: Any) -> None:
    """Write the page."""
    about = (
        f"Simulated in {page['took_s']} s of one core. Microseconds of virtual time, from the "
        "moment at which all ranks have called. Bound: the latencies of a binary tree of nodes, "
        "and the bytes that every node must receive at the rate of its link; less latency is "
        "possible where a node sends to several at once. The last columns are of the rank that has "
        "most: its messages, the ranks to which it sends, what it sends, and memory of buffers."
    )
    lines = heading(page, "Collectives on many simulated nodes", page["versions"], about)
    for link, per_node in ALL_REDUCES:
        ranks = "one rank" if per_node == 1 else f"{per_node} ranks"
        lines += [f"## All-reduce on nodes of {ranks}, {link.name}", ""]
        lines += [*times(page, link, per_node, ["all_reduce"]), ""]
    lines += [f"## One lane of nodes of 4 ranks, {MIDDLE.name}", ""]
    lines += [*one_lane(page), ""]
    for link, per_node in OTHERS:
        lines += [f"## Other collectives on nodes of {per_node} ranks, {link.name}", ""]
        lines += [*times(page, link, per_node, [*VERBS][1:]), ""]
    write(output, name, [*lines, "## What is left out", *LEFT_OUT.rstrip().splitlines()])


def times(page: dict[str, Any], link: Link, per_node: int, verbs: list[str]) -> list[str]:
    """Return the table of some collectives over one kind of link."""
    named = ["collective"] * (len(verbs) > 1)
    head = [*named, "nodes", "tensor", "time", "bound", "time / bound"]
    head += ["messages", "peers", "sent", "buffers"]
    rows = []
    for run in page["runs"]:
        if (run["link"], run["per_node"]) != (link.name, per_node) or run["verb"] not in verbs:
            continue
        if run["lane"]:  # in a table of its own
            continue
        verb, limit_s = run["verb"], bound_s(run, link)
        rows.append(
            [
                *[VERBS[verb]] * len(named),
                f"{run['nodes']:,}",
                size_label(run["kib"] / 1024),
                us(run["seconds"]),
                us(limit_s),
                f"{run['seconds'] / limit_s:.2f}",
                str(run["messages"]),
                str(run["peers"]),
                f"{run['bytes'] / (run['kib'] << 10):.2f} x the tensor",
                f"{run['buffer_bytes'] / MIB:.2g} MiB",
            ]
        )
    return table(head, rows, texts=2 + len(named))


def one_lane(page: dict[str, Any]) -> list[str]:
    """Return the table of calls of which one lane is simulated, and its words."""
    head = ["collective", "nodes", "tensor", "one lane", "bound", "one lane / bound", "all lanes"]
    head.append("messages")
    rows = []
    for run in page["runs"]:
        if not run["lane"]:
            continue
        limit_s = bound_s(run, MIDDLE)
        whole = [
            us(other["seconds"])
            for other in page["runs"]
            if not other["lane"] and all(other[key] == run[key] for key in SAME)
        ]
        row = [VERBS[run["verb"]], f"{run['nodes']:,}", size_label(run["kib"] / 1024)]
        row += [us(run["seconds"]), us(limit_s)]
        row += [f"{run['seconds'] / limit_s:.2f}", *(whole or ["-"]), str(run["messages"])]
        rows.append(row)
    return [*table(head, rows, texts=3), *ONE_LANE.rstrip().splitlines()]


def bound_s(run: dict[str, Any], link: Link) -> float:
    """Return the latencies of a tree of nodes, and the time of what a node must receive."""
    nodes, tensor_s = run["nodes"], (run["kib"] << 10) / link.rate
    tree_s = math.ceil(math.log2(nodes)) * link.latency_s
    if run["verb"] == "broadcast":
        return tree_s + tensor_s
    rounds = 2 if run["verb"] == "all_reduce" else 1
    return tree_s + rounds * tensor_s * (nodes - 1) / nodes


def us(seconds: float) -> str:
    """Format microseconds."""
    return f"{seconds * 1e6:,.0f}"


if __name__ == "__main__":
    main()
