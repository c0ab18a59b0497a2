from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mntrain.comm.algorithms import load
from mntrain.comm.chunk_plan import NO_RANK, Chunk, Lengths
from mntrain.comm.topology import Topology
from zero.layout import split

FASTER = ["flat", "leader", "lanes"]  # than the oracle, which has no plan


@st.composite
def topologies(draw):
    """Nodes of 1 to 4 ranks each, which are dealt to them in any order."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    ranks = draw(st.permutations(range(sum(lengths))))
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    nodes = [sorted(ranks[end - length : end]) for length, end in zip(lengths, ends, strict=True)]
    return Topology(tuple(sorted(map(tuple, nodes))))


numels = st.integers(0, 300) | st.integers(4000, 5000)
itemsizes = st.sampled_from([1, 2, 4, 8])
piece_lengths = st.sampled_from([1, 8, 100, 1000, 1 << 20])
algorithms = st.sampled_from(FASTER)


def schemes(algorithm, topology):
    return [load(algorithm).plan(topology, rank) for rank in range(topology.size)]


def same_on_all_ranks(several, plan):
    """The plan that every rank makes alike."""
    first, *others = [plan(scheme) for scheme in several]
    assert all(other == first for other in others)
    assert [piece.index for piece in first] == list(range(len(first)))
    return first


def covered(parts):
    """Return what parts cover, each element once, as runs that do not touch."""
    runs = []
    for low, high in sorted(part for part in parts if part[0] < part[1]):
        if runs and runs[-1][1] == low:
            runs[-1][1] = high
        else:
            assert not runs or runs[-1][1] < low, "an element is in two parts"
            runs.append([low, high])
    return runs


def all_of(low, high):
    return [[low, high]] if low < high else []


def lanes_take_turns(pieces, lanes):
    """A lane's next piece comes after every other lane has had its turn, or has no more."""
    counts = [0] * lanes
    left = [sum(piece.lane == lane for piece in pieces) for lane in range(lanes)]
    for piece in pieces:
        counts[piece.lane] += 1
        left[piece.lane] -= 1
        behind = [lane for lane in range(lanes) if counts[lane] < counts[piece.lane] - 1]
        assert all(left[lane] == 0 for lane in behind)


# All-reduce.


@given(topologies(), algorithms, numels, itemsizes, piece_lengths)
def test_sums_cover_every_element_once(topology, algorithm, numel, itemsize, length):
    several = schemes(algorithm, topology)
    pieces = same_on_all_ranks(
        several, lambda scheme: scheme.all_reduce(numel, itemsize, Lengths(length))
    )
    assert covered(part for piece in pieces for part in piece.parts) == all_of(0, numel)
    nodes = len(several[0].nodes.nodes)
    for piece in pieces:
        assert 0 < piece.parts[-1][1] - piece.parts[0][0] <= max(1, length // itemsize)
        assert all(before[1] == after[0] for before, after in pairwise(piece.parts))
        assert len(piece.parts) in (1, nodes)
        assert piece.shard_owners == ()
    lanes_take_turns(pieces, several[0].lanes)


# Reduce-scatter and all-gather.


@st.composite
def cut_tensors(draw):
    """A topology and bounds of shards, some of them empty."""
    topology = draw(topologies())
    numel = draw(numels)
    inner = st.lists(st.integers(0, numel), min_size=topology.size - 1, max_size=topology.size - 1)
    bounds = st.just(split(numel, topology.size))
    bounds |= inner.map(lambda marks: (0, *sorted(marks), numel))
    return topology, draw(bounds)


@given(cut_tensors(), algorithms, itemsizes, piece_lengths)
def test_shards_are_complete_and_every_piece_has_one_of_every_node(
    cut_tensor, algorithm, itemsize, length
):
    topology, bounds = cut_tensor
    several = schemes(algorithm, topology)
    pieces = same_on_all_ranks(
        several, lambda scheme: scheme.by_shard(bounds, itemsize, Lengths(length))
    )
    nodes, lanes = several[0].nodes, several[0].lanes
    found = {rank: [] for rank in range(topology.size)}
    for piece in pieces:
        assert len(piece.parts) == len(piece.shard_owners) == len(nodes.nodes)
        assert any(low < high for low, high in piece.parts)
        for node, (rank, (low, high)) in enumerate(
            zip(piece.shard_owners, piece.parts, strict=True)
        ):
            assert high - low <= max(1, length // itemsize // len(nodes.nodes))
            if rank == NO_RANK:
                assert low == high
                continue
            assert nodes.node(rank) == node
            assert nodes.local_rank(rank) % lanes == piece.lane
            if low < high:
                found[rank].append((low, high))
    for rank, parts in found.items():
        low, high = several[0].shard(rank, bounds)
        assert (low, high) == (
            bounds[several[0].slots[rank]],
            bounds[several[0].slots[rank] + 1],
        )
        assert covered(parts) == all_of(low, high)
        assert parts == sorted(parts)
    lanes_take_turns(pieces, lanes)


# Broadcast.


@given(topologies(), algorithms, numels, itemsizes, piece_lengths)
def test_copies_cover_every_element_once_and_are_dealt_to_the_lanes(
    topology, algorithm, numel, itemsize, length
):
    several = schemes(algorithm, topology)
    pieces = same_on_all_ranks(
        several, lambda scheme: scheme.broadcast(numel, itemsize, Lengths(length))
    )
    parts = [part for piece in pieces for part in piece.parts]
    assert len(parts) == len(pieces)
    assert covered(parts) == all_of(0, numel)
    assert parts == sorted(parts)
    assert all(0 < high - low <= max(1, length // itemsize) for low, high in parts)
    assert [piece.lane for piece in pieces] == [n % several[0].lanes for n in range(len(pieces))]


@given(topologies(), algorithms, st.data())
def test_a_broadcast_reaches_every_node_once(topology, algorithm, data):
    root = data.draw(st.integers(0, topology.size - 1))
    pieces = data.draw(st.integers(1, 40))
    scheme = load(algorithm).plan(topology, 0)
    nodes = scheme.nodes.nodes
    said = [each.route(root, pieces) for each in schemes(algorithm, topology)]
    ways = [said[node[0]] for node in nodes]
    assert said == [ways[scheme.nodes.node(rank)] for rank in range(topology.size)]
    first = scheme.nodes.node(root)
    depth = {first: 0}
    waiting = [first]
    while waiting:
        node = waiting.pop()
        for after in ways[node][1]:
            assert after not in depth
            assert ways[after][0] == node
            depth[after] = depth[node] + 1
            waiting.append(after)
    assert sorted(depth) == list(range(len(nodes)))
    assert ways[first][0] is None
    rounds = (len(nodes) - 1).bit_length()
    if len(ways[first][1]) < rounds:  # a chain
        assert sorted(depth.values()) == list(range(len(nodes)))
    else:  # a binomial tree: in each of its rounds, who has it sends it once
        assert max(depth.values()) <= rounds
        assert len(ways[first][1]) == rounds


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 16, 64, 100])
@pytest.mark.parametrize("pieces", [1, 2, 3, 8, 50])
def test_a_broadcast_is_not_slower_than_a_chain_or_a_tree(nodes, pieces):
    """The unit is the time in which a link carries one of so many pieces of a lane."""
    topology = Topology(tuple((2 * node, 2 * node + 1) for node in range(nodes)))
    plans = [load("lanes").plan(topology, 2 * node) for node in range(nodes)]
    come, end = [[0] * pieces, *([None] * pieces for _ in range(nodes - 1))], 0
    for node, plan in enumerate(plans):  # each gets the pieces from one before it
        free = 0
        for piece in range(pieces):
            for after in plan.route(0, 2 * pieces)[1]:
                free = max(free, come[node][piece]) + 1
                come[after][piece] = free
                end = max(end, free)
    rounds = (nodes - 1).bit_length()
    assert end <= min(nodes - 2 + pieces, rounds * pieces + rounds - 1)


# Hops of an exchange between nodes.


def factors(number):
    """Fours, then prime factors."""
    first = next((f for f in (4, *range(2, number + 1)) if number % f == 0), None)
    return [] if first is None else [first, *factors(number // first)]


def test_a_node_exchanges_parts_with_as_many_others_as_the_factors_of_their_number():
    for count in range(2, 1025):
        plan = load("lanes").plan(Topology(tuple((rank,) for rank in range(count))), count // 3)
        several = [plan.partners(hop) for hop in range(len(plan.widths) - 1)]
        assert [len(partners) + 1 for partners in several] == factors(count)
        assert len(set(chain(*several))) == sum(map(len, several))
    assert sum(map(len, several)) == 15  # of 1024 nodes; directly 1023


@pytest.mark.parametrize("count", [2, 3, 7, 8, 12, 17, 36])
def test_what_a_node_holds_is_divided_between_it_and_its_partners(count):
    topology = Topology(tuple((rank,) for rank in range(count)))
    chunk = Chunk(0, 0, tuple((3 * node, 3 * node + 3) for node in range(count)))
    for rank in range(count):
        plan = load("lanes").plan(topology, rank)
        for hop in range(len(plan.widths) - 1):
            assert plan.held(chunk, rank, hop) == [span_of(plan, rank, hop)]
            nodes = [*plan.partners(hop), rank]
            theirs = [span for node in nodes for span in plan.held(chunk, node, hop + 1)]
            assert covered(theirs) == [list(span_of(plan, rank, hop))]


def span_of(plan, node, hop):
    width = plan.widths[hop]
    return 3 * (node // width * width), 3 * (node // width * width + width)


@pytest.mark.parametrize("count", [2, 3, 5, 6, 8, 12, 16, 17, 24, 36, 64])
def test_every_part_is_a_sum_over_all_nodes_in_one_order_and_comes_to_all(count):
    topology = Topology(tuple((rank,) for rank in range(count)))
    plans = [load("lanes").plan(topology, rank) for rank in range(count)]
    hops = range(len(plans[0].widths) - 1)
    sums = [dict.fromkeys(range(count), (node,)) for node in range(count)]  # by node, of each part
    for hop in hops:
        before = [dict(own) for own in sums]
        for node, plan in enumerate(plans):
            group = sorted([node, *plan.partners(hop)])
            width = plan.widths[hop + 1]
            kept = range(node // width * width, node // width * width + width)
            sums[node] = {part: tuple(before[other][part] for other in group) for part in kept}
    orders = [order for own in sums for order in own.values()]
    assert len(set(orders)) == 1
    assert sorted(flat(orders[0])) == list(range(count))
    held = [{node} for node in range(count)]
    for hop in reversed(hops):
        held = [
            held[node].union(*(held[other] for other in plans[node].partners(hop)))
            for node in range(count)
        ]
    assert all(parts == set(range(count)) for parts in held)


def flat(order):
    return [order] if isinstance(order, int) else [node for part in order for node in flat(part)]


# Of one, two, two, three and five hops.
@pytest.mark.parametrize(("nodes", "chunks"), [(4, 8), (8, 4), (16, 4), (64, 3), (1024, 2)])
@pytest.mark.parametrize("verb", ["all_reduce", "by_shard"])
def test_a_chunk_has_64_kib_at_least_for_each_hop_between_nodes(verb, nodes, chunks):
    topology, numel = Topology(tuple((rank,) for rank in range(nodes))), 120 << 10
    plan = load("lanes").plan(topology, 0)
    if verb == "all_reduce":
        found = plan.all_reduce(numel, 4, Lengths(512 << 10))
    else:
        found = plan.by_shard(tuple(split(numel, nodes)), 4, Lengths(512 << 10))
    assert len(found) == chunks
