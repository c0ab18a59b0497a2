"""Simulate collectives on up to 1,024 nodes, in virtual time, beside bounds and formulas.

    python benchmarks/scale.py
    sudo python benchmarks/scale.py --emulated    all-reduces beside real ranks on emulated nodes

Ranks of nodes of one, four and eight run in this process (tests/simulation), without MPI, root or a
network, on one core in under ten minutes. Writes docs/results/scale.md and its picture: the virtual
time of collectives, from the moment at which all ranks call them, and what the busiest rank sends;
what rank 0 receives in a job with its watchdogs and checkpoints; and from these times the exposed
share of a training step (scale_model.py). Every rank's result is checked.

With --emulated, real ranks on two, four and eight emulated nodes, whose links are so slow that they
decide, and simulated ones with the same rate take turns; writes docs/results/scale-emulated.md.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from results import DOCS, MIB, bar_charts, facts, heading, ms, size_label, table, write
from scale_model import SOURCE, Call, Step


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
# Limits that are tried besides those of the library, on nodes of one rank.
TRIED_NODES, TRIED_KIB, TRIED_MESSAGE_S = (2, 16), (256, 4096), (1e-6, 20e-6)
CHUNKS_KIB, GROUPS = (64, 256, 1024, 4096), (2, 4, 8, 16)
SAME = ("verb", "nodes", "per_node", "kib", "link")  # of a lane's run and that of all lanes
JOBS = (4, 8)  # nodes of four ranks of the simulated jobs
EMULATED, LINK, EMULATED_KIB = ("1,1", "2,2", "1,1,1,1", "1,1,1,1,1,1,1,1"), "0.1gbit", (1024, 4096)
SMALL_KIB = 4  # whose time on two nodes is the latency of the emulated network, with MPI and Python
MODELS = {"124 M": 124e6, "1.3 B": 1.3e9}  # parameters of a GPT
TOKENS, FLOPS, STEP_NODES = 16_384, 200e12, 1024  # of a rank and step; computed per second
LEFT_OUT = """
The time to add, to copy and to read shared memory; everything that a computer does beside
the call, such as computing and its own threads; packets and their loss, and switches, which carry
everything at once. A message takes 1 us of its sender's CPU and 1 us of its receiver's. Up to 64
KiB it is sent at once, and a longer one when the receiver has answered. MPI makes progress without
being called, and a rank that waits sees a message when it arrives: it does not sleep meanwhile. So
these are times that the order and sizes of messages allow, not those of a machine.
Where slow links decide, they are those of [emulated nodes](scale-emulated.md).

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
LIMITS = """
All-reduces on nodes of one rank, with the chunks of the constants that suit 1 Gbit/s, with those
that the library chooses for the link, and with the best of four lengths. Where a message takes
1 us of CPU, as in the tables above, and where it takes 20, which is nearer to Python on a host. The
library measures the latency with these CPU times in it. Over links of 1 Gbit/s it takes the
constants.

The order of sums depends on the groups in which nodes exchange parts, so groups depend on the
number of nodes alone. What other groups would take on 16 nodes of one rank:
"""
RANK_0 = """
A job with its watchdogs, an optimizer of stage 1 with 64,064 parameters, and a checkpoint. Bytes
are what rank 0 receives over MPI, for each rank of the job. Those of the start are mostly one
gather of what every rank tells of its host, by which all ranks compare these. MPI's own messages
within its collective calls are not counted: an `MPI_Allgather` of P ranks has log2 P or P - 1. The
step's bytes are those of gradients and parameters, which do not grow with the job.

Beside MPI, ranks 0 and 1 are connected to all ranks. A connection takes one file descriptor, and
some 200 bytes when it is made. On {nodes:,} nodes of four ranks, each of the two has
{connections:,} of them, of the 65,536 files that `ulimit -n` often allows.

The run directory has one recording a rank (`recorder/`, of a fixed size), so that `autopsy` can
read what a rank did whose node is gone. All else is written by few: rank 0 writes metrics and the
summary, and a checkpoint has {files} files, in which all ranks write their parts.

What grows faster than log P on a rank, with its reason: what each rank knows of all others (host,
process, cores and versions, some 1 kB each, 4 MB on 4,096 ranks), by which it names any rank in an
error; the gathers of the start, of which each has P entries; and `world.gather` itself.
"""


def main() -> None:
    """Simulate every layout and size, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--emulated", action="store_true", help="compare with emulated nodes")
    options = parser.parse_args()
    for name in ("simulation", "helpers", "mpi"):
        sys.path.append(str(DOCS.parent / "tests" / name))
    if options.emulated:
        compare()
        return
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
    page |= {"runs": runs, "jobs": [job(nodes) for nodes in JOBS], "versions": versions()}
    page |= {"chunks": try_chunks(), "groups": try_groups()}
    publish(page | {"took_s": round(time.process_time())}, "scale", DOCS)


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
        link = Link(LINK, latency_s, layout.bytes_per_s)
        for kib in EMULATED_KIB:
            found = collective("all_reduce", len(layout.ranks), layout.ranks[0], kib, link)
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


def try_chunks() -> list[dict[str, Any]]:
    """Return times of all-reduces with chunks of several lengths, and with those of the library."""
    rows = []
    for nodes in TRIED_NODES:
        for kib in TRIED_KIB:
            for link in (MIDDLE, FAST):
                for message_s in TRIED_MESSAGE_S:
                    call = partial(
                        collective, "all_reduce", nodes, 1, kib, link, message_s=message_s
                    )
                    by_length, best_kib = min(
                        (call(chunk_kib=length)["seconds"], length)
                        for length in CHUNKS_KIB
                        if length <= kib
                    )
                    plain, suited = call(linked=False)["seconds"], call()["seconds"]
                    row = {"nodes": nodes, "kib": kib, "link": link.name, "message_s": message_s}
                    row |= {"constants": plain, "link_s": suited, "best_s": by_length}
                    rows.append(row | {"best_kib": best_kib})
    return rows


def try_groups() -> list[dict[str, Any]]:
    """Return times of all-reduces whose nodes exchange parts in groups of several sizes."""
    from mntrain.comm import chunk_plan  # noqa: PLC0415 - not needed to write the page

    rows, usual = [], chunk_plan.GROUP
    for kib in (64, 1024):
        for link in (SLOW, MIDDLE, FAST):
            seconds = []
            for chunk_plan.GROUP in GROUPS:
                seconds.append(collective("all_reduce", 16, 1, kib, link)["seconds"])
            rows.append({"kib": kib, "link": link.name, "seconds": seconds})
    chunk_plan.GROUP = usual
    return rows


def collective(
    verb: str,
    nodes: int,
    per_node: int,
    kib: int,
    link: Link,
    *,
    lane: bool = False,
    message_s: float = MESSAGE_S,
    linked: bool = True,
    chunk_kib: int = 0,
) -> dict[str, Any]:
    """Call a collective on fp32 over all ranks; return the virtual seconds, and what ranks send.

    With `lane`, over the ranks of one lane, with their part of the tensor and of each link. The
    library knows the link as it would measure it, if `linked`; or chunks have this length.
    """
    import torch  # noqa: PLC0415 - not needed to write the page
    from network import Link as SimulatedLink  # noqa: PLC0415 - as above
    from network import NetworkModel  # noqa: PLC0415 - as above
    from simulated_ranks import Rank, SimulatedRanks  # noqa: PLC0415 - as above

    from mntrain.comm import chunk_plan, hierarchical  # noqa: PLC0415 - as above
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
    known = links.Link(link.latency_s + 2 * message_s, between.rate) if linked else None
    tried = AlgorithmChoice("lanes", chunk_kib << 10, min_chunks=1)
    ranks = SimulatedRanks(
        [ranks_of_node] * nodes,
        network=NetworkModel(between=between, message_s=message_s),
        choice=tried if chunk_kib else AlgorithmChoice("lanes", link=known),
        watched=False,
        threads=False,
        switches=0,
    )
    gc.collect()
    gc.disable()  # it would look at millions of objects again and again
    in_flight, least = hierarchical.CHUNKS_IN_FLIGHT, chunk_plan.MIN_CHUNK_BYTES
    chunk_plan.MIN_CHUNK_BYTES = 1 if chunk_kib else least
    if lane and nodes > 2 and verb != "broadcast":  # as of each lane of several
        hierarchical.CHUNKS_IN_FLIGHT = hierarchical.CROWDED_CHUNKS_IN_FLIGHT
    try:
        begins, ends, messages, sent, peers, buffers = zip(*ranks.run(program), strict=True)
    finally:
        hierarchical.CHUNKS_IN_FLIGHT, chunk_plan.MIN_CHUNK_BYTES = in_flight, least
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


def job(nodes: int) -> dict[str, Any]:
    """Run a small job with its watchdogs; return what rank 0 has received after each part."""
    import torch  # noqa: PLC0415 - not needed to write the page
    from simulated_runs import SimulatedRuns  # noqa: PLC0415 - as above
    from simulated_watchdog import WatchedWorlds  # noqa: PLC0415 - as above

    from mntrain import World  # noqa: PLC0415 - as above

    class Job(SimulatedRuns, WatchedWorlds):  # type: ignore[misc]
        """Ranks whose watchdogs' bytes are counted."""

        told = 0  # bytes of rank 0

        def deliver(self, source: int, target: int, message: dict[str, Any]) -> None:
            super().deliver(source, target, message)
            if target == 0:
                self.told += len(json.dumps(message)) + 1

    ranks = Job([4] * nodes, switches=0, options={"device": "cpu"}, facts_of_hosts=True)
    parts: dict[str, list[int]] = {}
    torch.set_num_threads(1)

    def note(world: World, part: str) -> None:
        if world.rank == 0:
            mpi, channels = ranks.job, ranks.channels[0]
            found = [mpi.received[0], mpi.messages[0], len(mpi.peers[0])]
            parts[part] = [*found, ranks.told, len(channels.peers)]

    def program(world: World) -> None:
        note(world, "start")
        world.gather(None)
        note(world, "gather")
        model = torch.nn.Linear(1000, 64)
        optimizer = world.optimizer(model, torch.optim.AdamW, stage=1)
        checkpoints = world.checkpoints(folder, model=model, optimizer=optimizer, every=0)
        checkpoints.restore()
        note(world, "optimizer and checkpoints")
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        note(world, "step")
        checkpoints.save(1, now=True)
        note(world, "checkpoint")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        ranks.run_to_end(program)
        files = sum(path.is_file() for path in folder.glob("checkpoints/*/*"))
    parts["end"] = [*parts["checkpoint"][:3], ranks.told, parts["checkpoint"][4]]
    print(f"a job on {nodes} nodes", file=sys.stderr)
    return {"nodes": nodes, "per_node": 4, "parts": parts, "files": files}


def publish(page: dict[str, Any], name: str, output: Any) -> None:
    """Write the page."""
    about = (
        f"Simulated in {page['took_s']} s of one core. Microseconds of virtual time, from the "
        "moment at which all ranks have called. Bound: the latencies of a binary tree of nodes, "
        "and the bytes that every node must receive at the rate of its link; less latency is "
        "possible where a node sends to several at once. Ring, and halving and doubling: formulas "
        "of these algorithms over all ranks, without regard to nodes, for nothing but latencies "
        f"and bytes. MPICH: that of the algorithm which it chooses ({SOURCE}). The last columns "
        "are of the rank that has most: its messages, the ranks to which it sends, what it sends, "
        "and memory of buffers."
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
    lines += ["## Lengths of chunks, and groups of nodes", "", *limits(page), ""]
    lines += ["## Rank 0, the start, and files", "", *of_rank_0(page), ""]
    lines += [f"## A training step on {STEP_NODES:,} nodes", "", *steps(page, output), ""]
    write(output, name, page, [*lines, "## What is left out", *LEFT_OUT.rstrip().splitlines()])


def times(page: dict[str, Any], link: Link, per_node: int, verbs: list[str]) -> list[str]:
    """Return the table of some collectives over one kind of link."""
    named = ["collective"] * (len(verbs) > 1)
    head = [*named, "nodes", "tensor", "time", "bound", "time / bound", "ring"]
    head += ["halving and doubling", "MPICH", "messages", "peers", "sent", "buffers"]
    rows = []
    for run in page["runs"]:
        if (run["link"], run["per_node"]) != (link.name, per_node) or run["verb"] not in verbs:
            continue
        if run["lane"]:  # in a table of its own
            continue
        call, verb = call_of(run, link), run["verb"]
        formulas = (call.ring_s(verb), call.halving_s(verb), call.mpich_s(verb))
        rows.append(
            [
                *[VERBS[verb]] * len(named),
                f"{run['nodes']:,}",
                size_label(run["kib"] / 1024),
                us(run["seconds"]),
                us(call.bound_s(verb)),
                f"{run['seconds'] / call.bound_s(verb):.2f}",
                *map(us, formulas),
                str(run["messages"]),
                str(run["peers"]),
                f"{run['bytes'] / call.nbytes:.2f} x the tensor",
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
        bound_s = call_of(run, MIDDLE).bound_s(run["verb"])
        whole = [
            us(other["seconds"])
            for other in page["runs"]
            if not other["lane"] and all(other[key] == run[key] for key in SAME)
        ]
        row = [VERBS[run["verb"]], f"{run['nodes']:,}", size_label(run["kib"] / 1024)]
        row += [us(run["seconds"]), us(bound_s)]
        row += [f"{run['seconds'] / bound_s:.2f}", *(whole or ["-"]), str(run["messages"])]
        rows.append(row)
    return [*table(head, rows, texts=3), *ONE_LANE.rstrip().splitlines()]


def limits(page: dict[str, Any]) -> list[str]:
    """Return the tables of chunks and groups that were tried, and their words."""
    head = ["nodes", "tensor", "link", "us of CPU of a message", "constants", "from the link"]
    head += ["best length", "its chunks", "from the link / best"]
    rows = [
        [
            f"{row['nodes']}",
            size_label(row["kib"] / 1024),
            row["link"],
            f"{row['message_s'] * 1e6:.0f}",
            *(us(row[name]) for name in ("constants", "link_s", "best_s")),
            f"{row['best_kib']} KiB",
            f"{row['link_s'] / row['best_s']:.2f}",
        ]
        for row in page["chunks"]
    ]
    chunks = table(head, rows, texts=3)
    head = ["tensor", "link", *(f"groups of {group}" for group in GROUPS)]
    rows = [
        [size_label(row["kib"] / 1024), row["link"], *map(us, row["seconds"])]
        for row in page["groups"]
    ]
    chunks_words, groups_words = LIMITS.strip().split("\n\n")
    return [
        *chunks_words.splitlines(),
        "",
        *chunks,
        *groups_words.splitlines(),
        "",
        *table(head, rows, texts=2),
    ]


def call_of(run: dict[str, Any], link: Link, nodes: int | None = None) -> Call:
    """Return the call of a run, or the same one on another number of nodes."""
    count = nodes or run["nodes"]
    return Call(count, run["per_node"], run["kib"] << 10, link.latency_s, link.rate)


def us(seconds: float) -> str:
    """Format microseconds."""
    return f"{seconds * 1e6:,.0f}"


def of_rank_0(page: dict[str, Any]) -> list[str]:
    """Return the table of what rank 0 receives in a job, and its words."""
    head = ["nodes of 4 ranks", "part of the job", "bytes over MPI", "for each rank of the job"]
    head += ["messages sent", "peers so far", "bytes beside MPI", "connections beside MPI"]
    rows = []
    for found in page["jobs"]:
        size, before = found["nodes"] * found["per_node"], [0, 0, 0, 0, 0]
        for part, (received, messages, peers, told, connections) in found["parts"].items():
            own_bytes = received - before[0]
            own = [f"{own_bytes:,}", f"{own_bytes / size:,.0f}", f"{messages - before[1]}"]
            own += [f"{peers}", f"{told - before[3]:,}", f"{connections}"]
            rows.append([f"{found['nodes']}", part, *own])
            before = [received, messages, peers, told, connections]
    text = RANK_0.format(
        nodes=STEP_NODES, connections=4 * STEP_NODES - 1, files=page["jobs"][0]["files"]
    )
    return [*table(head, rows, texts=2), *text.rstrip().splitlines()]


def steps(page: dict[str, Any], output: Path) -> list[str]:
    """Return the table of training steps, from the times of buckets; draw their picture."""
    nodes = 16
    about = (
        f"A rank computes {TOKENS:,} tokens a step at {FLOPS / 1e12:.0f} TFLOP/s: 6 operations for "
        "each parameter and token, a third of them forward. Gradients and parameters travel in "
        f"fp32, in buckets of {BUCKET_KIB // 1024} MiB one after the other, while backward fills "
        f"the next. The time of a bucket on {STEP_NODES:,} nodes is the simulated one of all lanes "
        f"on {nodes} nodes, times the bound on {STEP_NODES:,} over that on {nodes}. One ring "
        "reduces by its formula. Updates take no time. The last columns are the milliseconds that "
        "are exposed, and their share of the step."
    )
    head = ["parameters", "links", "computing, ms", "all-reduces, ms", *STAGES]
    rows, panels = [], dict[str, list[float]]()
    for model, parameters in MODELS.items():
        for link in (MIDDLE, FAST):
            compute_s = 6 * parameters * TOKENS / FLOPS
            count = round(parameters * 4 / (BUCKET_KIB << 10))
            step = Step(compute_s / 3, compute_s * 2 / 3, max(1, count))
            reduce_s, scatter_s, gather_s = (
                bucket_s(page, verb, nodes, link) for verb in [*VERBS][:3]
            )
            ring_s = Call(STEP_NODES, 4, BUCKET_KIB << 10, link.latency_s, link.rate).ring_s(
                "all_reduce"
            )
            exposed = [
                step.reduced_s(ring_s),
                step.reduced_s(reduce_s),
                step.exposed_s(scatter_s, gather_s),
                step.exposed_s(scatter_s, gather_s, overlap_forward=True),
            ]
            rows.append(
                [model, link.name, ms(compute_s), ms(count * reduce_s)]
                + [f"{ms(one)} ({100 * step.share(one):.0f} %)" for one in exposed]
            )
            shares = [100 * step.share(one) for one in exposed]
            panels[f"{model}, {link.name}: exposed, % of a step"] = shares
    bar_charts(output / "img" / "scale.svg", STAGES, panels)
    picture = "![The exposed share of a step](../img/scale.svg)"
    return [about, "", *table(head, rows, texts=2), "", picture]


STAGES = ["one ring", "mntrain, stage 0", "mntrain, stages 1 and 2", "mntrain, overlap_forward"]


def bucket_s(page: dict[str, Any], verb: str, nodes: int, link: Link) -> float:
    """Return the time of a bucket's collective on the nodes of a step, from a simulated one."""
    run = next(
        run
        for run in page["runs"]
        if (run["verb"], run["nodes"], run["kib"], run["link"], run["per_node"], run["lane"])
        == (verb, nodes, BUCKET_KIB, link.name, 4, False)
    )
    bounds = [call_of(run, link, count).bound_s(verb) for count in (STEP_NODES, nodes)]
    return float(run["seconds"] * bounds[0] / bounds[1])


if __name__ == "__main__":
    main()
