"""What every verb sends, against a list of messages and closed forms worked out here."""

import socket
from itertools import accumulate, chain, pairwise, permutations, product

import pytest
import torch
from mpi4py import MPI
from worlds import EVERY_WORLD, RANKS, VIRTUAL, Worlds

from mntrain import mpi
from mntrain.collectives import ALGORITHMS, messages

pytestmark = pytest.mark.mpi

RANK = MPI.COMM_WORLD.rank
ITEM = 4  # bytes of an fp32 element
SIZES = [1200, 1201, 1003, 7, 2, 1, 0]


@pytest.fixture(scope="module")
def worlds():
    cache = Worlds()
    yield cache
    cache.close()


HOSTS = MPI.COMM_WORLD.allgather(socket.gethostname())


def nodes_of(layout):
    """Every node's ranks: virtual ones too lie on one host."""
    hosts, step = (layout, RANKS) if isinstance(layout, str) else (HOSTS, layout or RANKS)
    together = [[r for r in range(RANKS) if hosts[r] == host] for host in dict.fromkeys(hosts)]
    return [node[low : low + step] for node in together for low in range(0, len(node), step)]


def cut(numel, parts):
    bounds = [i * numel // parts for i in range(parts + 1)]
    return [after - before for before, after in pairwise(bounds)]


# Of one level: (source, to, elements, whether they travel in pieces), for every pair of members.


def scatter(members, lengths):
    """Everyone sends to each member what that one adds."""
    return [
        (members[s], members[t], lengths[t], True) for s, t in permutations(range(len(members)), 2)
    ]


def gather(members, lengths):
    """Everyone sends what is its own to each member."""
    return [
        (members[s], members[t], lengths[s], False) for s, t in permutations(range(len(members)), 2)
    ]


def both(members, numel):
    parts = cut(numel, len(members))
    return scatter(members, parts) + gather(members, parts)


def spread(members, root, numel):
    """The root cuts its tensor into parts for the others, which hand them to each other."""
    others = [member for member in members if member != root]
    parts = cut(numel, len(others)) if others else []
    first = [(root, to, part, False) for to, part in zip(others, parts, strict=True)]
    return first + gather(others, parts)


def naive(nodes, verb, shards, root):
    numel = sum(shards)
    pairs = [(s, t) for s, t in permutations(range(RANKS), 2) if verb != "broadcast" or s == root]
    return [(source, to, numel, False) for source, to in pairs]


def flat(nodes, verb, shards, root):
    ranks, numel = range(RANKS), sum(shards)
    return {
        "all_reduce": both(ranks, numel),
        "reduce_scatter": scatter(ranks, shards),
        "all_gather": gather(ranks, shards),
        "broadcast": spread(ranks, root, numel),
    }[verb]


def two_level(nodes, count, verb, shards, root):
    place = {rank: (m, local) for m, node in enumerate(nodes) for local, rank in enumerate(node)}
    lane_of = {rank: local % count for rank, (_, local) in place.items()}
    # Shards go by lane, then by node, then by local rank.
    order = sorted(place, key=lambda rank: (lane_of[rank], place[rank]))
    shard, numel = dict(zip(order, shards, strict=True)), sum(shards)
    lanes = [sum(shard[r] for r in order if lane_of[r] == lane) for lane in range(count)]
    owners = [[node[lane] for node in nodes] for lane in range(count)]
    blocks = [
        [sum(shard[r] for r in node if lane_of[r] == lane) for node in nodes]
        for lane in range(count)
    ]
    beyond = [(nodes[m][lane_of[r]], r) for r, (m, local) in place.items() if local >= count]
    padded = [[*lanes, *[0] * (len(node) - count)] for node in nodes]
    leaders = [node[0] for node in nodes]
    first = nodes[place[root][0]]
    return list(
        chain.from_iterable(
            {
                "all_reduce": [
                    *map(scatter, nodes, padded),
                    *map(both, owners, lanes),
                    *map(gather, nodes, padded),
                ],
                "reduce_scatter": [
                    *map(scatter, nodes, padded),
                    *map(scatter, owners, blocks),
                    [(owner, rank, shard[rank], False) for owner, rank in beyond],
                ],
                "all_gather": [
                    [(rank, owner, shard[rank], False) for owner, rank in beyond],
                    *map(gather, owners, blocks),
                    *map(gather, nodes, padded),
                ],
                "broadcast": [
                    spread(first, root, numel),
                    spread(leaders, first[0], numel),
                    *(spread(node, node[0], numel) for node in nodes if node is not first),
                ],
            }[verb]
        )
    )


def sent(algorithm, layout, verb, shards, root=0):
    """What all ranks send, with shards of these lengths: (source, to, elements, in pieces)."""
    nodes = nodes_of(layout)
    if algorithm in ("naive", "flat"):
        return {"naive": naive, "flat": flat}[algorithm](nodes, verb, shards, root)
    count = 1 if algorithm == "leader" else min(map(len, nodes))
    return two_level(nodes, count, verb, shards, root)


def bill(layout, transfers):
    """Messages and bytes within nodes, then between them, by rank."""
    node_of = {rank: m for m, node in enumerate(nodes_of(layout)) for rank in node}
    totals = [[0, 0, 0, 0] for _ in range(RANKS)]
    for source, to, elements, in_pieces in transfers:
        level = 0 if node_of[source] == node_of[to] else 2
        longest = messages.PIECE_BYTES if in_pieces else mpi.MESSAGE_BYTES
        totals[source][level] += -(-elements * ITEM // longest)
        totals[source][level + 1] += elements * ITEM
    return totals


def usage(world):
    return [
        [rank.node_messages, rank.node_bytes, rank.cross_messages, rank.cross_bytes]
        for rank in world.usage()
    ]


def launch(world, verb, numel, root):
    rooted = {"root": root} if verb == "broadcast" else {}
    return getattr(world.collectives, verb)(torch.zeros(numel), **rooted)


def cost(world, verb, numel, root=0):
    """What one collective adds to the counts of every rank."""
    before = usage(world)
    launch(world, verb, numel, root).wait()
    return less(usage(world), before)


def less(after, before):
    return [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]


VERBS = [
    ("all_reduce", 0),
    ("reduce_scatter", 0),
    ("all_gather", 0),
    *(("broadcast", root) for root in sorted({0, RANKS - 1})),
]


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_every_message_is_accounted_for(worlds, algorithm, layout):
    world = worlds(algorithm, layout)
    before = usage(world)
    for verb, root in VERBS:
        for work in [launch(world, verb, numel, root) for numel in SIZES]:
            work.wait()
        after = usage(world)
        expected = [sent(algorithm, layout, verb, cut(numel, RANKS), root) for numel in SIZES]
        assert less(after, before) == bill(layout, chain(*expected)), f"{verb} from {root}"
        before = after


def lengths():
    """Of shards: rising, with an empty one; and all in one slot, whichever it is."""
    rising = [100 * slot for slot in range(RANKS)]
    return [rising, *([1003 * (slot == full) for slot in range(RANKS)] for full in range(RANKS))]


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_every_message_is_accounted_for_with_bounds(worlds, algorithm, layout):
    world = worlds(algorithm, layout)
    before = usage(world)
    for verb, shards in product(("reduce_scatter", "all_gather"), lengths()):
        bounds = [0, *accumulate(shards)]
        getattr(world.collectives, verb)(torch.zeros(sum(shards)), bounds).wait()
        after = usage(world)
        expected = bill(layout, sent(algorithm, layout, verb, shards))
        assert less(after, before) == expected, f"{verb} of {shards}"
        before = after


@pytest.mark.parametrize("layout", VIRTUAL[-2:])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_parts_travel_in_pieces_and_long_messages_in_several(
    worlds, monkeypatch, algorithm, layout
):
    monkeypatch.setattr(messages, "PIECE_BYTES", 40)
    monkeypatch.setattr(mpi, "MESSAGE_BYTES", 52)
    world = worlds(algorithm, layout)
    for verb in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        expected = bill(layout, sent(algorithm, layout, verb, cut(101, RANKS)))
        assert cost(world, verb, 101) == expected, verb


# The formulas of the docstrings, where everything divides.

on_one_host = pytest.mark.skipif(
    len(set(HOSTS)) > 1, reason="counts of one level; the list of messages covers several hosts"
)
S = 1200 * ITEM
REDUCING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}  # in crossings of the wire


@on_one_host
def test_naive_sends_the_whole_tensor_to_everyone(worlds):
    world = worlds("naive")
    for verb in REDUCING:
        assert cost(world, verb, 1200) == [[RANKS - 1, S * (RANKS - 1), 0, 0]] * RANKS
    others = [[0, 0, 0, 0]] * (RANKS - 1)
    assert cost(world, "broadcast", 1200) == [[RANKS - 1, S * (RANKS - 1), 0, 0], *others]


@on_one_host
def test_flat_sends_all_but_a_shard(worlds):
    world = worlds("flat")
    for verb, times in REDUCING.items():
        nbytes = times * S * (RANKS - 1) // RANKS
        assert cost(world, verb, 1200) == [[times * (RANKS - 1), nbytes, 0, 0]] * RANKS


@on_one_host
def test_a_broadcast_hands_every_other_rank_the_tensor_once(worlds):
    others = RANKS - 1
    root, *rest = cost(worlds("flat"), "broadcast", 1200)
    assert root == ([others, S, 0, 0] if others else [0, 0, 0, 0])
    assert rest == [[others - 1, S * (others - 1) // others, 0, 0] for _ in range(others)]


@pytest.mark.parametrize("layout", [layout for layout in VIRTUAL if RANKS % (layout or 1) == 0])
@pytest.mark.parametrize("algorithm", ["leader", "lanes"])
def test_an_owner_sends_its_lane_over_the_wire_as_often_as_it_must(worlds, algorithm, layout):
    world = worlds(algorithm, layout)
    nodes = nodes_of(layout)
    m, ranks = len(nodes), len(nodes[0])
    if any(len(node) != ranks for node in nodes):
        pytest.skip("the closed form is for equal nodes; the list of messages covers others")
    lanes = 1 if algorithm == "leader" else ranks
    owns = [place < lanes for place in world.gather(world.local_rank)]
    for verb, times in REDUCING.items():
        cross = [counts[3] for counts in cost(world, verb, 1200)]
        assert cross == [own * times * (m - 1) * S // (m * lanes) for own in owns], verb
    within = [counts[1] for counts in cost(world, "all_reduce", 1200)]
    # Less its own lane, which goes to each of the others.
    expected = [S - own * S // lanes + own * (ranks - 1) * S // lanes for own in owns]
    assert within == (expected if ranks > 1 else [0] * RANKS)
