"""Simulate all-reduces on up to 1,024 nodes, in virtual time, beside the bounds of the network.

    python benchmarks/scale.py
    sudo python benchmarks/scale.py --emulated    the same beside real ranks on emulated nodes

Ranks of nodes of one and of four run in this process (tests/simulation), without MPI, root or a
network, on one core in under ten minutes. Nodes are joined by links of 100 Gbit/s and 5 us. Writes
docs/results/scale.md: the virtual time of an all-reduce, from the moment at which all ranks call
it, and the messages and bytes that a rank sends at most. Every rank's sum is checked.

With --emulated, real ranks on two, four and eight emulated nodes, whose links are so slow that they
decide, and simulated ones with the same rate take turns; writes docs/results/scale-emulated.md.
"""

import argparse
import gc
import math
import sys
import time
from typing import Any

from results import DOCS, facts, heading, ms, size_label, table, write

RATE, LATENCY_S, MESSAGE_S = 12.5e9, 5e-6, 1e-6
NODES, PER_NODE = (2, 4, 16, 64, 256, 1024), (1, 4)
# Ranks that one process simulates at most, by ranks of a node and KiB.
MOST_RANKS = {
    1: {1: 4096, 64: 1024, 1024: 64, 25 * 1024: 16},
    4: {1: 4096, 64: 1024, 1024: 256, 25 * 1024: 64},
}
EMULATED, LINK, EMULATED_KIB = ("1,1", "2,2", "1,1,1,1", "1,1,1,1,1,1,1,1"), "0.1gbit", (1024, 4096)
SMALL_KIB = 4  # whose time on two nodes is the latency of the emulated network, with MPI and Python
LEFT_OUT = """
Left out: the time to add, to copy and to read shared memory; everything that a computer does beside
the call, such as computing and its own threads; packets and their loss, and switches, which carry
everything at once. A message takes 1 us of its sender's CPU and 1 us of its receiver's. Up to 64
KiB it is sent at once, and a longer one when the receiver has answered. MPI makes progress without
being called, and a rank that waits sees a message when it arrives: it does not sleep meanwhile. So
these are times that the order and sizes of messages allow, not those of a machine.
Where slow links decide, they are those of [emulated nodes](scale-emulated.md).
"""


def main() -> None:
    """Simulate every layout and size, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most-nodes", type=int, default=NODES[-1])
    parser.add_argument("--emulated", action="store_true", help="compare with emulated nodes")
    options = parser.parse_args()
    sys.path.append(str(DOCS.parent / "tests" / "simulation"))
    if options.emulated:
        compare()
        return
    page, begun = facts(), time.monotonic()
    runs = [
        all_reduce(nodes, per_node, kib)
        for per_node in PER_NODE
        for kib, most in MOST_RANKS[per_node].items()
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


def compare() -> None:
    """Run the same all-reduces on emulated nodes and simulated ones, and write the page."""
    from emulated import Layout, nodes  # noqa: PLC0415 - it needs root and the tools of emulation

    page, runs, latency_s = facts(), list[dict[str, Any]](), 0.0
    sizes = [kib / 1024 for kib in (SMALL_KIB, *EMULATED_KIB)]
    arguments = ["--mib", *sizes, "--verbs", "all_reduce", "--peers"]
    for text in EMULATED:
        layout = Layout.of(text, LINK)
        assert layout.bytes_per_s is not None
        with nodes(layout) as running:
            job = running.run("collectives.py", arguments)
        rows = [row for row in job["rows"] if row["what"] == "mntrain lanes"]
        real = {round(row["mib"] * 1024): row["median_s"] for row in rows}
        latency_s = latency_s or real[SMALL_KIB]
        for kib in EMULATED_KIB:
            found = all_reduce(
                len(layout.ranks), layout.ranks[0], kib, latency_s, layout.bytes_per_s
            )
            runs.append(found | {"emulated_s": real[kib]})
    page |= {"runs": runs, "latency_s": latency_s, "versions": versions()}
    publish_emulated(page, "scale-emulated", DOCS)


def publish_emulated(page: dict[str, Any], name: str, output: Any) -> None:
    """Write the page of emulated nodes."""
    about = (
        f"All-reduces of fp32 over links of {LINK}, in milliseconds: the median of real ranks on "
        "emulated nodes, and the virtual time of simulated ones with the rate of the links and a "
        f"latency of {ms(page['latency_s'])} ms, the time of {SMALL_KIB} KiB on two emulated nodes."
    )
    lines = heading(page, "Simulated nodes beside emulated ones", page["versions"], about)
    head = ["nodes", "ranks of a node", "tensor", "emulated", "simulated", "simulated / emulated"]
    rows = [
        [
            f"{run['nodes']}",
            f"{run['per_node']}",
            size_label(run["kib"] / 1024),
            ms(run["emulated_s"]),
            ms(run["seconds"]),
            f"{run['seconds'] / run['emulated_s']:.2f}",
        ]
        for run in page["runs"]
    ]
    write(output, name, page, [*lines, *table(head, rows, texts=3)])


def all_reduce(
    nodes: int, per_node: int, kib: int, latency_s: float = LATENCY_S, rate: float = RATE
) -> dict[str, Any]:
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

    network = NetworkModel(between=Link(latency_s, rate), message_s=MESSAGE_S)
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
