"""Simulate all-reduces on up to 1,024 nodes, in virtual time, beside the bounds of the network.

    python benchmarks/scale.py

Ranks of nodes of one and of four run in this process (tests/simulation), without MPI, root or a
network, on one core in under ten minutes. Nodes are joined by links of 100 Gbit/s and 5 us. Writes
docs/results/scale.md: the virtual time of an all-reduce, from the moment at which all ranks call
it, and the messages and bytes that a rank sends at most. Every rank's sum is checked.
"""

import argparse
import gc
import math
import sys
import time
from typing import Any

from results import DOCS, facts, heading, size_label, table, write

RATE, LATENCY_S, MESSAGE_S = 12.5e9, 5e-6, 1e-6
NODES, PER_NODE = (2, 4, 16, 64, 256, 1024), (1, 4)
MOST_RANKS = {1: 4096, 64: 1024, 1024: 64, 25 * 1024: 16}  # that one process simulates, by KiB
LEFT_OUT = """
Left out: the time to add, to copy and to read shared memory; everything that a computer does beside
the call, such as computing and its own threads; packets and their loss, and switches, which carry
everything at once. A message takes 1 us of its sender's CPU and 1 us of its receiver's. Up to 64
KiB it is sent at once, and a longer one when the receiver has answered. MPI makes progress without
being called, and a rank that waits sees a message when it arrives: it does not sleep meanwhile. So
these are times that the order and sizes of messages allow, not those of a machine.
"""


def main() -> None:
    """Simulate every layout and size, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most-nodes", type=int, default=NODES[-1])
    options = parser.parse_args()
    sys.path.append(str(DOCS.parent / "tests" / "simulation"))
    page, begun = facts(), time.monotonic()
    runs = [
        all_reduce(nodes, per_node, kib)
        for per_node in PER_NODE
        for kib, most in MOST_RANKS.items()
        for nodes in NODES
        if nodes * per_node <= most and nodes <= options.most_nodes
    ]
    took_s = round(time.monotonic() - begun)
    publish(page | {"runs": runs, "took_s": took_s, "versions": versions()}, "scale", DOCS)


def versions() -> dict[str, str]:
    """Return the versions on which the messages depend."""
    import torch  # noqa: PLC0415 - not needed to write the page

    from mntrain import __version__  # noqa: PLC0415 - as above

    return {"mntrain": __version__, "torch": torch.__version__}


def all_reduce(nodes: int, per_node: int, kib: int) -> dict[str, Any]:
    """Sum a tensor of fp32 over all ranks; return the virtual seconds, and a rank's messages."""
    import torch  # noqa: PLC0415 - not needed to write the page
    from network import Link, NetworkModel  # noqa: PLC0415 - as above
    from simulated_ranks import Rank, SimulatedRanks  # noqa: PLC0415 - as above

    torch.set_num_threads(1)
    length, size = kib << 8, nodes * per_node
    total = torch.full((length,), sum(rank % 3 for rank in range(size)), dtype=torch.float32)

    def program(rank: Rank) -> tuple[float, float, int, int]:
        tensor = torch.full_like(total, rank.rank % 3)
        job, at = rank.ranks.job, rank.rank
        rank.collectives.call_together(lambda: None, "the start").wait()
        messages, sent, begun_s = job.messages[at], job.bytes[at], rank.ranks.time.local_now()
        rank.collectives.all_reduce(tensor).wait()
        ended_s = rank.ranks.time.local_now()
        assert torch.equal(tensor, total)
        return begun_s, ended_s, job.messages[at] - messages, job.bytes[at] - sent

    network = NetworkModel(between=Link(LATENCY_S, RATE), message_s=MESSAGE_S)
    ranks = SimulatedRanks(
        [per_node] * nodes, network=network, watched=False, threads=False, switches=0
    )
    gc.collect()
    gc.disable()  # it would look at millions of objects again and again
    try:
        begins, ends, messages, sent = zip(*ranks.run(program), strict=True)
    finally:
        gc.enable()
    print(f"{nodes} nodes of {per_node}, {kib} KiB", file=sys.stderr)
    return {
        "nodes": nodes,
        "per_node": per_node,
        "kib": kib,
        "seconds": max(ends) - max(begins),
        "messages": max(messages),
        "bytes": max(sent),
    }


def publish(page: dict[str, Any], name: str, output: Any) -> None:
    """Write the page."""
    about = (
        f"Links of 100 Gbit/s and 5 us; simulated in {page['took_s']} s. Microseconds of virtual "
        "time. Latencies: log2 of the nodes, as of a binary tree; fewer are possible where a node "
        "sends to several at once. "
        "Bytes: what every node must send and receive at least, at the rate of its link. The last "
        "columns are of the rank that sends most."
    )
    lines = heading(page, "All-reduces on many simulated nodes", page["versions"], about)
    head = ["nodes", "tensor", "time", "latencies", "bytes", "time / both", "messages", "sent"]
    for per_node in PER_NODE:
        rows = [row(run) for run in page["runs"] if run["per_node"] == per_node]
        ranks = "one rank" if per_node == 1 else f"{per_node} ranks"
        lines += [f"## Nodes of {ranks}", "", *table(head, rows, texts=2), ""]
    write(output, name, page, [*lines, *LEFT_OUT.strip().splitlines()])


def row(run: dict[str, Any]) -> list[str]:
    """Return the cells of one run."""
    nodes, nbytes = run["nodes"], run["kib"] << 10
    latencies_s = math.ceil(math.log2(nodes)) * LATENCY_S
    bytes_s = 2 * nbytes * (nodes - 1) / nodes / RATE
    return [
        f"{nodes:,}",
        size_label(run["kib"] / 1024),
        f"{run['seconds'] * 1e6:,.0f}",
        f"{latencies_s * 1e6:.0f}",
        f"{bytes_s * 1e6:,.1f}",
        f"{run['seconds'] / (latencies_s + bytes_s):.2f}",
        str(run["messages"]),
        f"{run['bytes'] / nbytes:.2f} x the tensor",
    ]


if __name__ == "__main__":
    main()
