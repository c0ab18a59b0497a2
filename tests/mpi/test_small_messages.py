"""Small tensors that everyone gathers whole: the same results, to the bit, as in pieces."""

import pytest
import torch
from cases import PLACES, RANK, Way, bits, cases, run, shard
from worlds import EVERY_WORLD, RANKS, VIRTUAL, make_world

from mntrain.comm import small_messages
from mntrain.comm.small_messages import small_collective

pytestmark = pytest.mark.simulated

SIZES = [0, 1, 2, 3, 17, 1003, 5003]
SMALL_MESSAGE_BYTES = 64 << 10
BY_PIECES = [world for world in EVERY_WORLD if world.values[0] != "naive"]


@pytest.fixture
def gathers(monkeypatch):
    """The verbs that were gathered since, by length."""
    seen = []

    def noted(plan, ticket, access, context):
        seen.append(access.bounds[-1])
        return small_collective(plan, ticket, access, context)

    monkeypatch.setattr("mntrain.comm.hierarchical.small_collective", noted)
    return seen


@pytest.mark.both
@pytest.mark.parametrize(("algorithm", "layout"), BY_PIECES)
def test_every_verb_at_every_size_twice(ways, gathers, algorithm, layout):
    way = ways(algorithm, layout).gathered()
    several = [case for place in PLACES for case in cases(way, SIZES, roots=[0], place=place)]
    several += cases(way, SIZES, roots=[RANKS - 1])
    run(way.world, several)
    run(way.world, several)  # on the same tensors
    empty = sum(case.tensor.numel() == 0 for case in several)
    assert len(gathers) == 2 * (len(several) - empty)


def test_every_verb_along_trees_of_many_ranks(ways, monkeypatch):
    monkeypatch.setattr(small_messages, "DIRECT_RANKS", 1)
    way = ways("lanes", VIRTUAL[-1]).gathered()
    for root in range(RANKS):
        run(way.world, cases(way, [1, 17, 1003], roots=[root]))
    assert way.world.gather("x" * RANK) == ["x" * rank for rank in range(RANKS)]


@pytest.mark.parametrize("layout", VIRTUAL)
def test_sums_beyond_what_a_dtype_holds_are_infinite_or_no_number_and_nobody_is_warned(
    ways, layout
):
    way = ways("lanes", layout)
    most, inf = torch.finfo(torch.float32).max, float("inf")
    mine = torch.tensor([most, inf if RANK else -inf, float("nan") if RANK else 0, 1.0])
    whole, pieces = mine.clone(), mine.clone()
    way.gathered().collectives.all_reduce(whole).wait()
    way.collectives.all_reduce(pieces).wait()
    assert whole.isnan().tolist() == pieces.isnan().tolist()
    assert whole.nan_to_num().tolist() == pieces.nan_to_num().tolist()
    assert whole.isnan().tolist() == [False, True, True, False]
    assert whole[0] == inf


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("gathered", [True, False])
def test_what_is_only_moved_may_have_any_dtype(ways, gathered, dtype):
    way = ways("lanes", VIRTUAL[-1])
    collectives = (way.gathered() if gathered else way).collectives
    expected = (torch.arange(1003) % 2).to(dtype)
    tensor = expected.clone() if RANK == RANKS - 1 else torch.zeros(1003).to(dtype)
    collectives.broadcast(tensor, RANKS - 1).wait()
    assert torch.equal(bits(tensor), bits(expected))
    mine = shard(collectives, 1003)
    only = torch.zeros(1003).to(dtype)
    only[mine] = expected[mine]
    collectives.all_gather(only).wait()
    assert torch.equal(bits(only), bits(expected))


def test_what_is_larger_goes_in_pieces(ways, gathers):
    way = ways("lanes", VIRTUAL[-1]).gathered(SMALL_MESSAGE_BYTES)
    most = SMALL_MESSAGE_BYTES // 4 // RANKS
    for numel in (most, most + 1):
        run(way.world, cases(way, [numel], roots=[0]))
    assert gathers == [most] * 4
    naive = Way(way.world, "naive", 1 << 20, way.arena, SMALL_MESSAGE_BYTES)
    run(way.world, cases(naive, [most], roots=[0]))
    assert gathers == [most] * 4


def test_a_world_gathers_what_is_small_unless_it_is_told_not_to(gathers, monkeypatch):
    with make_world("lanes", VIRTUAL[-1]) as world:
        world.collectives.all_reduce(torch.ones(3)).wait()
        assert gathers == []  # by these tests' conftest
    monkeypatch.setattr("mntrain.comm.world_collectives.SMALL_MESSAGE_BYTES", SMALL_MESSAGE_BYTES)
    with make_world("lanes", VIRTUAL[-1]) as world:
        assert world.sum([1.0, 2.0]) == [RANKS, 2 * RANKS]
        assert gathers == [2]


@pytest.mark.parametrize("layout", VIRTUAL)
def test_what_is_sent_counts_as_a_message_to_everybody(ways, layout):
    way = ways("lanes", layout).gathered()
    before = way.world.usage()
    way.collectives.all_reduce(torch.ones(100)).wait()
    way.collectives.broadcast(torch.ones(10), RANKS - 1).wait()
    after = way.world.usage()
    for rank, (was, now) in enumerate(zip(before, after, strict=True)):
        node = len(way.world.topology.node_group(rank)) - 1
        cross = RANKS - 1 - node
        also = rank == RANKS - 1
        assert now.node_messages - was.node_messages == node * (1 + also)
        assert now.node_bytes - was.node_bytes == node * (400 + 40 * also)
        assert now.cross_messages - was.cross_messages == cross * (1 + also)
        assert now.cross_bytes - was.cross_bytes == cross * (400 + 40 * also)
