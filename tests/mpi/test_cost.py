"""Messages and bytes of every verb, against transfers and closed forms worked out here."""

import socket
from contextlib import ExitStack
from functools import cache
from itertools import accumulate, chain, pairwise, permutations, product

import pytest
import torch
from cases import RANK, out_of_reach
from mpi4py import MPI
from worlds import EVERY_WORLD, RANKS, VIRTUAL

from mntrain.comm import mpi
from mntrain.comm.ticket import AlgorithmChoice
from mntrain.train.plan.traffic import collective
from zero.layout import ParameterSpec, lay_out

pytestmark = pytest.mark.simulated

ITEM = 4  # bytes of an fp32 element
PIECE = AlgorithmChoice("lanes").chunk_bytes
SIZES = [0, 1, 7, 9001, 70001]


@pytest.fixture
def costs(ways):
    """Worlds by layout, and some memory that the ranks of a node share in each.

    Memory outside of it is out of reach, unless it is to be `private`.
    """
    with ExitStack() as stack:

        def make(layout=None, *, private=False):
            if isinstance(layout, str) and len(set(hosts_of_ranks())) > 1:
                pytest.skip("ranks that are said to be on one node are not, and share no memory")
            way = ways("lanes", layout)
            if not private:
                stack.enter_context(out_of_reach())
            return way.world, way.arena

        yield make


@cache
def hosts_of_ranks():
    return MPI.COMM_WORLD.allgather(socket.gethostname())


def nodes_of(layout):
    """Every node's ranks: virtual ones too lie on one host."""
    given = isinstance(layout, str)
    hosts, step = (layout, RANKS) if given else (hosts_of_ranks(), layout or RANKS)
    together = [[r for r in range(RANKS) if hosts[r] == host] for host in dict.fromkeys(hosts)]
    return [node[low : low + step] for node in together for low in range(0, len(node), step)]


def split(numel, parts):
    bounds = [i * numel // parts for i in range(parts + 1)]
    return [after - before for before, after in pairwise(bounds)]


def in_lines(numel, parts):
    """Return the sizes of parts of whole lines of 64 bytes, the last one as it comes."""
    lines = split(-(-numel // 16), parts)
    ends = [min(16 * end, numel) for end in accumulate(lines)]
    return [end - start for start, end in pairwise([0, *ends])]


def cut(numel, most):
    """Return the sizes of parts of about one length, of so many elements at most."""
    return split(numel, -(-numel // most)) if numel else []


def piece_of(numel, piece_bytes):
    """The elements of a piece, where so many are cut: an eighth, but 64 KiB are not cut."""
    return max(1, min(piece_bytes, max(numel * ITEM // 8, 64 << 10)) // ITEM)


# A transfer is (who does it, from, to, elements). The owner of a lane reads and writes the memory
# of its node; a message is sent by the rank that has it.


def all_reduce(nodes, lanes, shard, piece_bytes):
    numel = sum(shard.values())
    for lane, length in enumerate(in_lines(numel, lanes)):
        owners = [node[lane] for node in nodes]
        most = piece_of(length, piece_bytes) if len(nodes) > 1 else max(1, piece_bytes // ITEM)
        for piece in cut(length, most):
            whole = len(nodes) <= 2
            parts = [piece] if whole else in_lines(piece, len(nodes))
            for node, owner in zip(nodes, owners, strict=True):
                for part, peer in product(parts, set(node) - {owner}):
                    yield owner, peer, owner, part
                    yield owner, owner, peer, part
            for (i, a), (j, b) in permutations(enumerate(owners), 2):
                if whole:
                    yield a, a, b, piece
                else:
                    yield a, a, b, parts[j]  # of its sum
                    yield a, a, b, parts[i]  # of the result


def slots_of(nodes):
    """The rank of every slot: by lane, then by node, then by local rank."""
    lanes = min(map(len, nodes))
    return [rank for lane in range(lanes) for node in nodes for rank in node[lane::lanes]]


def shard_pieces(nodes, lanes, shard, piece_bytes):
    """Yield by lane what travels together, as (holder, elements) of every node; None: nobody's."""
    most = max(1, piece_of(sum(shard.values()) // lanes, piece_bytes) // len(nodes))
    for lane in range(lanes):
        columns = [node[lane::lanes] for node in nodes]
        for row in range(max(map(len, columns))):
            holders = [column[row] if row < len(column) else None for column in columns]
            cuts = [[] if h is None else cut(shard[h], most) for h in holders]
            for step in range(max(map(len, cuts))):
                lengths = [parts[step] if step < len(parts) else 0 for parts in cuts]
                yield lane, list(zip(holders, lengths, strict=True))


def reduce_scatter(nodes, lanes, shard, piece_bytes):
    for lane, parts in shard_pieces(nodes, lanes, shard, piece_bytes):
        owners = [node[lane] for node in nodes]
        for node, owner, (holder, part) in zip(nodes, owners, parts, strict=True):
            for peer, (_, length) in product(set(node) - {owner}, parts):
                yield owner, peer, owner, length
            if holder not in (owner, None):
                yield owner, owner, holder, part
        for (_, a), (j, b) in permutations(enumerate(owners), 2):
            yield a, a, b, parts[j][1]


def all_gather(nodes, lanes, shard, piece_bytes):
    for lane, parts in shard_pieces(nodes, lanes, shard, piece_bytes):
        owners = [node[lane] for node in nodes]
        for i, (node, owner) in enumerate(zip(nodes, owners, strict=True)):
            for j, (holder, length) in enumerate(parts):
                if i == j and holder not in (owner, None):
                    yield owner, holder, owner, length
                for peer in set(node) - {owner, holder}:
                    yield owner, owner, peer, length
        if len(nodes) > 2 and len(set(map(len, nodes))) > 1:
            # On a ring: to the next node everything but what that node has.
            for i, (a, b) in enumerate(zip(owners, [*owners[1:], owners[0]], strict=True)):
                for j, (_, length) in enumerate(parts):
                    if j != (i + 1) % len(nodes):
                        yield a, a, b, length
            continue
        for (i, a), (_, b) in permutations(enumerate(owners), 2):
            yield a, a, b, parts[i][1]


def broadcast(nodes, lanes, shard, piece_bytes, root):
    numel = sum(shard.values())
    pieces = cut(numel, piece_of(numel, piece_bytes))
    first = next(i for i, node in enumerate(nodes) if root in node)
    order = nodes[first:] + nodes[:first]
    for number, piece in enumerate(pieces):
        owners = [node[number % lanes] for node in order]
        for place, (node, owner) in enumerate(zip(order, owners, strict=True)):
            source = root if root in node else owner
            if source != owner:
                yield owner, source, owner, piece
            for peer in set(node) - {owner, source}:
                yield owner, owner, peer, piece
            if place:  # in a chain; or in a binomial tree, under who lacks its lowest bit
                before = owners[place - 1 if len(pieces) > 1 else place & (place - 1)]
                yield before, before, owner, piece


def transfers(algorithm, layout, verb, shards, *, root=0, piece_bytes=PIECE):
    """All of them, with shards of these lengths."""
    nodes, numel = nodes_of(layout), sum(shards)
    if algorithm == "naive":
        everyone = permutations(range(RANKS), 2)
        return [(s, s, t, numel) for s, t in everyone if verb != "broadcast" or s == root]
    shard = dict(zip(slots_of(nodes), shards, strict=True))  # by rank, whatever the algorithm
    lanes = min(map(len, nodes)) if algorithm == "lanes" else 1
    if algorithm == "flat":
        nodes = [[rank] for rank in range(RANKS)]
    if verb == "broadcast":
        return list(broadcast(nodes, lanes, shard, piece_bytes, root))
    make = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
    return list(make[verb](nodes, lanes, shard, piece_bytes))


def bill(algorithm, layout, several, *, near=True, item=ITEM):
    """Return messages and bytes by rank: within nodes (`near`: shared memory), then between."""
    node_of = {rank: m for m, node in enumerate(nodes_of(layout)) for rank in node}
    totals = [[0, 0, 0, 0] for _ in range(RANKS)]
    for worker, source, to, elements in several:
        within = node_of[source] == node_of[to]
        level = 0 if within else 2
        grouped = within and algorithm in ("leader", "lanes")
        nbytes = elements * (ITEM if grouped else item)
        if grouped and near:
            totals[worker][1] += nbytes
        else:
            totals[source][level] += -(-nbytes // mpi.MESSAGE_BYTES)
            totals[source][level + 1] += nbytes
    return totals


def usage(world):
    return [
        [rank.node_messages, rank.node_bytes, rank.cross_messages, rank.cross_bytes]
        for rank in world.usage()
    ]


def less(after, before):
    return [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]


def launch(collectives, verb, tensor, root=0, **given):
    rooted = {"root": root} if verb == "broadcast" else {}
    return getattr(collectives, verb)(tensor, **rooted, **given)


def cost(world, algorithm, verb, tensor, *, piece_bytes=PIECE, **given):
    """Return what one collective adds to the counts of every rank."""
    collectives = world.collectives.replace(choice=AlgorithmChoice(algorithm, piece_bytes))
    before = usage(world)
    launch(collectives, verb, tensor, **given).wait()
    return less(usage(world), before)


def reached(world):
    return all(world.gather(bool(world.collectives.memory.pids)))


VERBS = [
    ("all_reduce", 0),
    ("reduce_scatter", 0),
    ("all_gather", 0),
    *(("broadcast", root) for root in sorted({0, RANKS - 1})),
]


@pytest.mark.parametrize("place", ["plain", "private", "shared"])
@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_every_transfer_is_accounted_for(costs, algorithm, layout, place):
    world, arena = costs(layout, private=place == "private")
    if place == "private" and max(map(len, nodes_of(layout))) > 1 and not reached(world):
        pytest.skip("the kernel lets no process copy from another's memory")
    collectives = world.collectives.replace(choice=AlgorithmChoice(algorithm))
    before = usage(world)
    for verb, root in VERBS:
        arena.clear()
        at = "shared" if place == "shared" else "plain"
        tensors = [arena.tensor(numel, torch.float32, at).zero_() for numel in SIZES]
        for work in [launch(collectives, verb, tensor, root) for tensor in tensors]:
            work.wait()
        after = usage(world)
        several = [
            transfers(algorithm, layout, verb, split(numel, RANKS), root=root) for numel in SIZES
        ]
        expected = bill(algorithm, layout, chain(*several), near=place != "plain")
        assert less(after, before) == expected, f"{verb} from {root}"
        before = after


@pytest.mark.parametrize("layout", VIRTUAL)
def test_a_node_sends_messages_where_a_tensor_lies_out_of_reach_and_others_do_not(costs, layout):
    world, arena = costs(layout)
    nodes = nodes_of(layout)
    last = RANKS - 1
    for algorithm, verb in product(("leader", "lanes"), ("all_reduce", "broadcast")):
        arena.clear()
        place = "plain" if last == RANK else "shared"
        tensor = arena.tensor(9001, torch.float32, place).zero_()
        several = transfers(algorithm, layout, verb, split(9001, RANKS))
        far = [each for each in several if {*each[1:3]} <= set(nodes[-1])]
        near = [each for each in several if not {*each[1:3]} <= set(nodes[-1])]
        expected = [
            [a + b for a, b in zip(*pair, strict=True)]
            for pair in zip(
                bill(algorithm, layout, far, near=False),
                bill(algorithm, layout, near),
                strict=True,
            )
        ]
        assert cost(world, algorithm, verb, tensor) == expected, f"{algorithm}, {verb}"


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_every_transfer_is_accounted_for_with_bounds(costs, algorithm, layout):
    world, _ = costs(layout)
    rising = [100 * slot for slot in range(RANKS)]  # with an empty one
    one_slot = [9003 * (slot == RANKS // 2) for slot in range(RANKS)]
    for verb, shards in product(("reduce_scatter", "all_gather"), [rising, one_slot]):
        numel = sum(shards)
        bounds = [0, *accumulate(shards)]
        found = cost(world, algorithm, verb, torch.zeros(numel), bounds=bounds)
        several = transfers(algorithm, layout, verb, shards)
        expected = bill(algorithm, layout, several, near=False)
        assert found == expected, f"{verb} of {shards}"


@pytest.mark.parametrize("piece_bytes", [600, 16384])
@pytest.mark.parametrize(
    ("algorithm", "layout"),
    [("naive", None), ("flat", VIRTUAL[-1]), *product(["leader", "lanes"], VIRTUAL)],
)
def test_pieces_and_long_messages_go_as_several(costs, monkeypatch, algorithm, layout, piece_bytes):
    monkeypatch.setattr(mpi, "MESSAGE_BYTES", 1000)
    world, arena = costs(layout)
    for verb, root in VERBS:
        for numel, place in [(403, "shared"), (2003, "plain")]:
            arena.clear()
            tensor = arena.tensor(numel, torch.float32, place).zero_()
            found = cost(world, algorithm, verb, tensor, piece_bytes=piece_bytes, root=root)
            shards = split(numel, RANKS)
            several = transfers(algorithm, layout, verb, shards, root=root, piece_bytes=piece_bytes)
            expected = bill(algorithm, layout, several, near=place == "shared")
            assert found == expected, f"{verb} of {numel} from {root}"


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_16_bits_an_element_go_to_other_nodes_where_the_wire_is_so_wide(
    costs, algorithm, layout, verb
):
    world, _ = costs(layout)
    for numel in (1003, 5003):
        found = cost(world, algorithm, verb, torch.zeros(numel), wire=torch.bfloat16)
        several = transfers(algorithm, layout, verb, split(numel, RANKS))
        assert found == bill(algorithm, layout, several, near=False, item=2)


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_the_plan_of_a_job_has_what_all_ranks_send(costs, algorithm, layout):
    world, arena = costs(layout)
    [bucket] = lay_out([ParameterSpec("a", (70001,), torch.float32)], 1 << 30, RANKS)
    for verb in ("all_reduce", "reduce_scatter", "all_gather"):
        arena.clear()
        tensor = arena.tensor(bucket.numel, torch.float32, "shared").zero_()
        given = {} if verb == "all_reduce" else {"bounds": bucket.bounds}
        found = cost(world, algorithm, verb, tensor, **given)
        _, within, _, between = map(sum, zip(*found, strict=True))
        sent = collective(verb, bucket, world.topology, algorithm, itemsize=ITEM, wire=ITEM)
        # Where a tensor is cut, a flat algorithm's messages have an element more or less.
        assert sent.node == pytest.approx(within, abs=64 * ITEM * RANKS**2), verb
        assert sent.cross == pytest.approx(between, abs=64 * ITEM * RANKS**2), verb
