"""The plan of a hierarchical collective: its nodes, lanes and chunks. Pure.

A plan is made of the nodes of a topology and a number of lanes. Lane k is the part of a tensor that
local rank k owns on every node:

    flat      every rank is a node of its own    one lane
    leader    the topology's nodes               one lane, owned by the leaders
    lanes     the topology's nodes               as many lanes as the smallest node has ranks

An all-reduce cuts a tensor into lanes, a lane into chunks, and with more than two nodes a chunk
into one part per node, which that node sums and sends back:

    tensor   | lane 0                      | lane 1                      |
    chunks   | chunk       | chunk         | chunk       | chunk         |
    parts    | n0 | n1 | n2| ...

A reduce-scatter or an all-gather takes shards where they lie: the first chunk of a lane holds the
beginning of one shard of every node, and the next chunk continues it. All ranks start chunks in the
same order, so no circle of waiting ranks arises.

Lengths of chunks suit the link between nodes (`HierarchyPlan.lengths`). No sum depends on them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from mntrain.comm.link import power_of_two
from mntrain.comm.ticket import MIN_CHUNKS, AlgorithmChoice, Signature
from mntrain.comm.topology import Topology
from zero.layout import split

Span = tuple[int, int]  # elements from, to

EMPTY: Span = (0, 0)
NO_RANK = -1
# Lanes and parts begin at whole cache lines where the verb leaves the choice.
LINE_BYTES = 64
# A lane is not cut into shorter chunks for the sake of their number, for each hop of an exchange
# between nodes: on each, a chunk costs the latency of a message and CPU time, whatever its length.
MIN_CHUNK_BYTES = 64 << 10
LONG_LANE_BYTES = 24 << 20  # from here on, the first and the last chunk matter less than CPU time
# More bytes than switches can buffer would be dropped on the way to a node to which all others
# send. A chunk has no more for the sake of a fast link.
BYTES_IN_FLIGHT = 4 << 20
# Up to this length, MPI libraries commonly send a message at once (Open MPI's btl_tcp_eager_limit).
# A longer one is announced, and waits for an answer. The announcement waits, too, for what other
# chunks send, so a link is idle now and then however many chunks are in flight.
AT_ONCE_BYTES = 64 << 10
# Chunks of a broadcast down a chain, for each node but the first and the last.
CHAIN_CHUNKS = 4
# Chunks in flight: enough to fill a link while other ranks compute on the core.
CHUNKS_IN_FLIGHT = 8
# Of a call alone, but a broadcast, where several nodes send to one by several lanes: parts of more
# chunks queue up on the way to one node, while links to others are free.
CROWDED_CHUNKS_IN_FLIGHT = 4
# Nodes exchange parts in groups of so many where that divides their number, else of its factors.
GROUP = 4


@dataclass(frozen=True)
class Chunk:
    """Elements in flight together. `parts` has one part, or one for every node of the plan.

    `shard_owners`: by node, the rank whose shard the part belongs to, or NO_RANK if there is none;
    empty if the parts belong to all ranks.
    """

    index: int  # in the order in which all ranks start them
    lane: int
    parts: tuple[Span, ...]
    shard_owners: tuple[int, ...] = ()


class Lengths(NamedTuple):
    """Bytes of the chunks of a lane, over all nodes, and their number."""

    most: int
    min_chunks: int = MIN_CHUNKS  # unless they get shorter than the least
    link_least: int = 0  # for the sake of the link
    in_flight: int = 2  # at most
    at_once: bool = False  # whether they are short enough for messages that MPI sends at once


class HierarchyPlan:
    """The nodes and lanes of an algorithm, as seen by one rank. Hashable by identity.

    `slots` maps rank to slot, the same for all algorithms of a world.
    """

    def __init__(self, nodes: Topology, lanes: int, slots: tuple[int, ...], rank: int) -> None:
        self.nodes, self.lanes, self.slots = nodes, lanes, slots
        self.node = nodes.node(rank)
        self.local_rank = nodes.local_rank(rank)
        self.members = nodes.node_group(rank)  # of this rank's node, by local rank

    @cached_property
    def lane_owners(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that own each lane, one per node."""
        return tuple(tuple(n[lane] for n in self.nodes.nodes) for lane in range(self.lanes))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Numbers of neighbouring nodes whose parts a node holds: at first, and after each hop.

        Nodes exchange parts hop by hop. In each, groups of few nodes send each other what they
        are to hold next. So a node of M sends O(log M) messages a chunk, but for large prime
        factors of M, and no more bytes than if each sent every other its part:

            12 nodes, widths 12, 3, 1      hop 0                        hop 1
            node 4 exchanges with          7, 10, 1 (then holds 3 to 5) 5, 3 (then holds 4)

        Sums are made in the order of a hop's nodes, hop by hop, for every element alike.
        """
        widths = [len(self.nodes.nodes)]
        for factor in (GROUP, *range(2, widths[0] + 1)):
            while widths[-1] > 1 and widths[-1] % factor == 0:
                widths.append(widths[-1] // factor)
        return tuple(widths) if len(widths) > 1 else (1, 1)

    def partners(self, hop: int) -> list[int]:
        """Return the other nodes with which this one exchanges parts, from the next one on.

        So every node receives from one other at a time.
        """
        width, above = self.widths[hop + 1], self.widths[hop]
        first, step = self.node // above * above, self.node % above
        return [first + (step + width * turn) % above for turn in range(1, above // width)]

    def held(self, chunk: "Chunk", node: int, hop: int) -> list[Span]:
        """Return the spans of a chunk that a node holds before a hop, joined where they meet."""
        width = self.widths[hop]
        low = node // width * width
        spans: list[Span] = []
        for start, end in chunk.parts[low : low + width]:
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]  # noqa: PLW2901 - the joined one's
            spans.append((start, end))
        return [span for span in spans if span[0] < span[1]]

    @cached_property
    def crowded(self) -> bool:
        """True if several nodes send to one at once, by several lanes."""
        return self.lanes > 1 and len(self.nodes.nodes) > 2

    @cached_property
    def gathers_on_ring(self) -> bool:
        """True if an all-gather goes around a ring of nodes instead of hop by hop.

        That is so if there are more than two nodes and their numbers of shards differ: the largest
        node would send more than every node must receive.
        """
        return len(set(map(len, self.nodes.nodes))) > 1 and len(self.nodes.nodes) > 2

    @cached_property
    def _shard_rows(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Rows of ranks by lane, one per node (or NO_RANK), whose shards are in flight together."""
        lanes = []
        for lane in range(self.lanes):
            columns = [node[lane :: self.lanes] for node in self.nodes.nodes]
            rows = range(max(map(len, columns)))
            lanes.append(
                tuple(tuple(c[row] if row < len(c) else NO_RANK for c in columns) for row in rows)
            )
        return tuple(lanes)

    def lengths(self, nbytes: int, choice: AlgorithmChoice, narrowed: int = 1) -> Lengths:
        """Return the lengths of the chunks of a tensor of so many bytes, `narrowed` on the wire.

        The first and the last chunk delay a call, and every chunk costs each rank its messages. A
        long lane gets longer chunks, unless other tensors are in flight. So does a fast link, on
        which messages take longer than bytes: a chunk then has half of the bytes that pass while so
        many messages do one after the other, and a long lane twice as many. Where messages that are
        sent at once carry about as much, those between several nodes are no longer; with other
        tensors in flight, which cost CPU time, only if an announcement takes longer than they do.
        """
        most, least, at_once = choice.chunk_bytes, 0, False
        longest = self.widths[0] // self.widths[1] * narrowed * AT_ONCE_BYTES  # of the first hop
        if not choice.concurrent and nbytes // self.lanes >= LONG_LANE_BYTES:
            most *= 2
        if (link := choice.link) is not None and len(self.nodes.nodes) > 1:
            meanwhile = link.bytes_during(self.messages / 2) / self.lanes
            least = min(power_of_two(meanwhile), BYTES_IN_FLIGHT)
            at_once = len(self.nodes.nodes) > 2 and meanwhile < 1.5 * longest
            if choice.concurrent:
                at_once = at_once and link.bytes_during(1) > AT_ONCE_BYTES
        for_link = max(most, min(2 * least, BYTES_IN_FLIGHT))
        return Lengths(
            min(for_link, longest) if at_once else for_link,
            choice.min_chunks,
            least if least > MIN_CHUNK_BYTES else 0,
            max(2, BYTES_IN_FLIGHT // max(most, least)),
            at_once,
        )

    @cached_property
    def messages(self) -> int:
        """The number of messages that a node sends for a chunk of an all-reduce."""
        if len(self.nodes.nodes) <= 2:
            return len(self.nodes.nodes) - 1
        return 2 * sum(above // width - 1 for above, width in pairwise(self.widths))

    def all_reduce(self, numel: int, itemsize: int, lengths: Lengths) -> tuple[Chunk, ...]:
        """Return the chunks of an all-reduce."""
        shape = len(self.nodes.nodes), self.lanes, len(self.widths) - 1
        return _all_reduce(shape, numel, itemsize, lengths)

    def by_shard(
        self, bounds: tuple[int, ...], itemsize: int, lengths: Lengths
    ) -> tuple[Chunk, ...]:
        """Return the chunks of a reduce-scatter, which are also those of an all-gather."""
        count = len(self.nodes.nodes)
        numel, hops = bounds[-1] // self.lanes, len(self.widths) - 1
        whole = _chunk_length(numel, itemsize, lengths, hops)
        length = max(1, whole // count)
        chunks = []
        for lane, rows in enumerate(self._shard_rows):
            number = 0
            for ranks in rows:
                shards = [EMPTY if r == NO_RANK else self.shard(r, bounds) for r in ranks]
                cuts = [_cut(shard, length) for shard in shards]
                for step in range(max(map(len, cuts))):
                    parts = tuple(cut[step] if step < len(cut) else EMPTY for cut in cuts)
                    chunks.append((number, lane, parts, ranks))
                    number += 1
        return _in_order(chunks)

    def broadcast(self, numel: int, itemsize: int, lengths: Lengths) -> tuple[Chunk, ...]:
        """Return the chunks of a broadcast, which take the lanes in turn and travel by `route`."""
        count = len(self.nodes.nodes)
        # In a chain, a chunk is under way for as long as so many others of its lane, and as many
        # latencies; between them it costs a node one message.
        wanted = max(lengths.min_chunks, CHAIN_CHUNKS * (count - 2) * self.lanes)
        least = min(lengths.link_least, 6 * lengths.link_least // max(1, self.messages))
        most = min(lengths.most, max(AT_ONCE_BYTES, least)) if lengths.at_once else lengths.most
        of_chain = lengths._replace(most=most, min_chunks=wanted, link_least=least)
        cuts = _cut((0, numel), _chunk_length(numel, itemsize, of_chain))
        return _in_order([(n, n % self.lanes, (part,), ()) for n, part in enumerate(cuts)])

    def shard(self, rank: int, bounds: tuple[int, ...]) -> Span:
        """Return the span of a rank's shard."""
        slot = self.slots[rank]
        return bounds[slot], bounds[slot + 1]

    def route(self, root: int, chunks: int) -> tuple[int | None, list[int]]:
        """Return the node that sends a broadcast's chunk here, and the nodes that get it from here.

        Many chunks go along a chain of nodes, in which every link carries every chunk once. Few go
        down a binomial tree, which is less deep, but in which the root sends each several times.
        """
        count, first = len(self.nodes.nodes), self.nodes.node(root)
        place = (self.node - first) % count  # in the chain or tree
        of_lane = -(-chunks // self.lanes)
        chain, tree = count - 2 + of_lane, of_lane * (count - 1).bit_length()  # times of a chunk
        if chain < tree:
            before, after = place - 1, [place + 1]
        else:
            low = place & -place if place else 1 << count.bit_length()
            steps = [1 << i for i in reversed(range(low.bit_length() - 1))]  # powers below `low`
            before, after = place - low, [place + step for step in steps]
        source = (before + first) % count if place else None
        return source, [(node + first) % count for node in after if node < count]


@lru_cache(maxsize=1024)
def chunks_of(
    plan: HierarchyPlan, call: Signature, bounds: tuple[int, ...]
) -> tuple[tuple[Chunk, ...], int]:
    """Return the chunks of a call, and how many may be in flight.

    `bounds` are those of the tensor that is cut: of a part of the call's, if it has several.
    """
    choice, dtype = call.choice, call.dtype
    assert choice is not None
    assert dtype is not None
    narrowed = dtype.itemsize // (call.wire or dtype).itemsize
    lengths = plan.lengths(call.bounds[-1] * dtype.itemsize, choice, narrowed)
    most = min(CHUNKS_IN_FLIGHT, lengths.in_flight)
    if call.verb != "broadcast" and plan.crowded and not choice.concurrent:
        most = min(most, CROWDED_CHUNKS_IN_FLIGHT)
    if call.verb == "all_reduce":
        return plan.all_reduce(bounds[-1], dtype.itemsize, lengths), most
    if call.verb == "broadcast":
        return plan.broadcast(bounds[-1], dtype.itemsize, lengths), most
    return plan.by_shard(bounds, dtype.itemsize, lengths), most


@lru_cache(maxsize=256)
def _all_reduce(
    shape: tuple[int, int, int], numel: int, itemsize: int, lengths: Lengths
) -> tuple[Chunk, ...]:
    """Return the chunks of an all-reduce on so many nodes, by so many lanes and hops."""
    count, lanes, hops = shape
    line = max(1, LINE_BYTES // itemsize)
    chunks = []
    for lane, (low, high) in enumerate(_aligned((0, numel), lanes, line)):
        length = lengths.most // itemsize
        if count > 1:
            length = _chunk_length(high - low, itemsize, lengths, hops)
        for number, span in enumerate(_cut((low, high), length)):
            parts = (span,) if count <= 2 else tuple(_aligned(span, count, line))
            chunks.append((number, lane, parts, ()))
    return _in_order(chunks)


def _chunk_length(numel: int, itemsize: int, lengths: Lengths, hops: int = 1) -> int:
    """Return the elements of a chunk of `numel` elements that travel so many hops."""
    least = max(MIN_CHUNK_BYTES * hops, lengths.link_least)
    nbytes = max(numel * itemsize // lengths.min_chunks, least)
    return max(1, min(lengths.most, nbytes) // itemsize)


def _aligned(span: Span, parts: int, line: int) -> list[Span]:
    """Cut a span into parts of whole lines, equal to within one line."""
    low, high = span
    marks = [low + min(mark * line, high - low) for mark in split(-(-(high - low) // line), parts)]
    return list(pairwise(marks))


def _cut(span: Span, length: int) -> list[Span]:
    """Cut a span into as few parts of at most this length as possible, of about equal length."""
    low, high = span
    count = -(-(high - low) // max(1, length))
    marks = [low + mark for mark in split(high - low, count)] if count else []
    return list(pairwise(marks))


def _in_order(
    chunks: Iterable[tuple[int, int, tuple[Span, ...], tuple[int, ...]]],
) -> tuple[Chunk, ...]:
    """Return chunks in the order of their numbers within a lane, taking the lanes in turn."""
    return tuple(
        Chunk(index, lane, parts, owners)
        for index, (_, lane, parts, owners) in enumerate(sorted(chunks, key=lambda c: c[:2]))
    )
