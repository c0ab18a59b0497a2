"""What of a tensor travels with what: which lane, between which nodes, in which pieces. Pure.

A scheme says which ranks count as one node, and how many lanes join the nodes:

    flat      every rank is a node of its own                one lane
    leader    nodes as they are                              one lane, owned by the leaders
    lanes     nodes as they are                              as many as the smallest node has ranks

An all-reduce cuts a tensor into lanes, a lane into pieces, and with more than two nodes a piece
into a part for each node, which that node sums and hands back:

    tensor   | lane 0                      | lane 1                      |
    pieces   | piece       | piece         | piece       | piece         |
    parts    | n0 | n1 | n2| ...

A reduce-scatter or an all-gather takes shards where they lie: the first piece of a lane has the
beginning of every node's shard, the next one goes on. The order of pieces is the same on all ranks:
each starts them in that order, and so nobody waits in a circle.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from mntrain.comm.algorithms.selection import MIN_CHUNKS
from mntrain.comm.topology import LaneLayout, Topology
from zero.layout import split

Span = tuple[int, int]  # elements from, to

NOWHERE: Span = (0, 0)
NOBODY = -1
# Lanes and parts begin at whole cache lines where the verb leaves the choice.
LINE_BYTES = 64
# A lane is not cut into shorter pieces for the sake of their number.
LEAST_BYTES = 64 << 10
# Up to this size every node sends all it has to every other: one message's time, not two.
SMALL_BYTES = 16 << 10


@dataclass(frozen=True)
class Chunk:
    """What travels together. `parts` has one part, or one for every node (of the scheme).

    `ranks`: by node, whose shard the part is, NOBODY where there is none; empty where the parts are
    everybody's.
    """

    index: int  # in the order in which all ranks start them
    lane: int
    parts: tuple[Span, ...]
    ranks: tuple[int, ...] = ()


class HierarchyPlan:
    """The nodes and lanes of an algorithm, as seen by one rank. Hashable by identity."""

    def __init__(self, nodes: Topology, lanes: int, slots: tuple[int, ...], rank: int) -> None:
        self.nodes, self.lanes, self.slots = nodes, lanes, slots
        self.node = nodes.node(rank)
        self.local_rank = nodes.local_rank(rank)
        self.members = nodes.node_group(rank)  # of this rank's node, by local rank

    @classmethod
    def of(cls, algorithm: str, topology: Topology, rank: int) -> "HierarchyPlan":
        """The scheme of flat, leader or lanes in a world. Slots are the same for all three."""
        slots = world_slots(topology)
        if algorithm == "flat":
            return cls(Topology(tuple((r,) for r in range(topology.size))), 1, slots, rank)
        return cls(topology, topology.smallest_node if algorithm == "lanes" else 1, slots, rank)

    @cached_property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """By lane: the rank that owns it on each node."""
        return tuple(tuple(n[lane] for n in self.nodes.nodes) for lane in range(self.lanes))

    @cached_property
    def uneven(self) -> bool:
        """Whether some nodes have more shards than others, and so more to hand to all others.

        An all-gather then goes on a ring, on which nobody sends more than the whole without the
        shards of the node that comes next: no more than some node must receive.
        """
        return len(set(map(len, self.nodes.nodes))) > 1 and len(self.nodes.nodes) > 2

    @cached_property
    def _served(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By lane: rows of ranks, one a node (or NOBODY), whose shards travel together."""
        served = []
        for lane in range(self.lanes):
            columns = [node[lane :: self.lanes] for node in self.nodes.nodes]
            rows = range(max(map(len, columns)))
            served.append(
                tuple(tuple(c[row] if row < len(c) else NOBODY for c in columns) for row in rows)
            )
        return tuple(served)

    @lru_cache(maxsize=256)  # noqa: B019 - a world has few schemes, which live as long as it does
    def sums(
        self, numel: int, itemsize: int, piece_bytes: int, least: int = MIN_CHUNKS
    ) -> tuple[Chunk, ...]:
        """The pieces of an all-reduce."""
        count, line = len(self.nodes.nodes), max(1, LINE_BYTES // itemsize)
        whole = count <= 2 or numel * itemsize <= SMALL_BYTES
        runs = []
        for lane, (low, high) in enumerate(_aligned((0, numel), self.lanes, line)):
            length = piece_bytes // itemsize
            if count > 1:
                length = _length(high - low, itemsize, piece_bytes, least)
            for number, part in enumerate(_cut((low, high), length)):
                parts = (part,) if whole else tuple(_aligned(part, count, line))
                runs.append((number, lane, parts, ()))
        return _in_order(runs)

    @lru_cache(maxsize=256)  # noqa: B019 - as above
    def shards(
        self, bounds: tuple[int, ...], itemsize: int, piece_bytes: int, least: int = MIN_CHUNKS
    ) -> tuple[Chunk, ...]:
        """The pieces of a reduce-scatter, and of an all-gather."""
        count = len(self.nodes.nodes)
        numel = bounds[-1] // self.lanes
        length = max(1, _length(numel, itemsize, piece_bytes, least) // count)
        runs = []
        for lane, rows in enumerate(self._served):
            number = 0
            for ranks in rows:
                shards = [NOWHERE if r == NOBODY else self.shard(r, bounds) for r in ranks]
                cuts = [_cut(shard, length) for shard in shards]
                for step in range(max(map(len, cuts))):
                    parts = tuple(cut[step] if step < len(cut) else NOWHERE for cut in cuts)
                    runs.append((number, lane, parts, ranks))
                    number += 1
        return _in_order(runs)

    @lru_cache(maxsize=256)  # noqa: B019 - as above
    def copies(
        self, numel: int, itemsize: int, piece_bytes: int, least: int = MIN_CHUNKS
    ) -> tuple[Chunk, ...]:
        """The pieces of a broadcast, dealt to the lanes in turn."""
        cuts = _cut((0, numel), _length(numel, itemsize, piece_bytes, least))
        return _in_order([(n, n % self.lanes, (part,), ()) for n, part in enumerate(cuts)])

    def shard(self, rank: int, bounds: tuple[int, ...]) -> Span:
        """Where a rank's shard lies."""
        slot = self.slots[rank]
        return bounds[slot], bounds[slot + 1]

    def route(self, root: int, pieces: int) -> tuple[int | None, list[int]]:
        """From which node a broadcast's piece comes here, and to which nodes it goes on.

        A chain, in which every link carries every piece once; one piece alone takes a binomial
        tree, which is shorter.
        """
        count, first = len(self.nodes.nodes), self.nodes.node(root)
        place = (self.node - first) % count  # in the chain or tree
        if pieces > 1:
            before, after = place - 1, [place + 1]
        else:
            low = place & -place if place else 1 << count.bit_length()
            before, after = place - low, [place + step for step in _powers_below(low)]
        source = (before + first) % count if place else None
        return source, [(then + first) % count for then in after if then < count]


def world_slots(topology: Topology) -> tuple[int, ...]:
    """Rank to slot, whatever the algorithm: so that each may move any tensor of a world."""
    return LaneLayout(topology, topology.smallest_node).slots


def _powers_below(limit: int) -> list[int]:
    return [1 << i for i in reversed(range(limit.bit_length() - 1))]


def _length(numel: int, itemsize: int, piece_bytes: int, least: int) -> int:
    """Elements of a piece, of so many bytes at most, when so many elements make so many pieces."""
    nbytes = max(numel * itemsize // least, LEAST_BYTES)
    return max(1, min(piece_bytes, nbytes) // itemsize)


def _aligned(part: Span, parts: int, line: int) -> list[Span]:
    """A part in so many, equal to within a line, which begin at whole lines after its start."""
    low, high = part
    marks = [low + min(mark * line, high - low) for mark in split(-(-(high - low) // line), parts)]
    return list(pairwise(marks))


def _cut(part: Span, length: int) -> list[Span]:
    """A part in as few as have at most this length; they are of about one length."""
    low, high = part
    count = -(-(high - low) // max(1, length))
    marks = [low + mark for mark in split(high - low, count)] if count else []
    return list(pairwise(marks))


def _in_order(
    runs: Iterable[tuple[int, int, tuple[Span, ...], tuple[int, ...]]],
) -> tuple[Chunk, ...]:
    """Pieces in the order of their numbers, lanes in turn."""
    return tuple(
        Chunk(index, lane, parts, ranks)
        for index, (_, lane, parts, ranks) in enumerate(sorted(runs, key=lambda run: run[:2]))
    )
