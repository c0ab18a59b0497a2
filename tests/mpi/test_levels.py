"""Exchanges between many nodes, level by level: here of four or eight, in groups of two."""

from itertools import product

import pytest
import torch
from cases import RANK, Case, Ways, cases, cuts, in_order, run
from worlds import RANKS, VIRTUAL, make_world

from mntrain.comm import chunk_plan

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.skipif(RANKS not in (4, 8), reason="fewer nodes have one level"),
]


@pytest.fixture(scope="module")
def ways():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_plan, "GROUP", 2)
        cache = Ways()
        yield cache
        cache.close()


@pytest.mark.both
@pytest.mark.parametrize("algorithm", ["flat", "lanes"])
@pytest.mark.parametrize("place", ["plain", "mixed"])
def test_every_verb_by_levels(ways, algorithm, place):
    for layout in VIRTUAL:
        way = ways(algorithm, layout)
        run(way.world, cases(way, [0, 1, 3, 17, 5003, 70001], roots=[RANKS - 1], place=place))


@pytest.mark.skipif(RANKS != 8, reason="six nodes, of unequal numbers of ranks")
@pytest.mark.parametrize("algorithm", ["leader", "lanes"])
@pytest.mark.parametrize("place", ["plain", "mixed", "shared"])
def test_every_verb_by_levels_of_unequal_nodes(ways, algorithm, place):
    for layout in ("abbccdef", "aabcdeff"):
        way = ways(algorithm, layout, 4096)
        several = [
            Case(way, verb, numel, bounds=bounds, place=place)
            for numel in (17, 9001)
            for bounds in cuts(numel)
            for verb in ("reduce_scatter", "all_gather")
        ]
        run(way.world, [*cases(way, [0, 1, 5003], roots=[RANKS - 1], place=place), *several])


def shuffled(numel, dtype):
    """Values of each rank whose sum depends on the order."""
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(numel, generator=draw).to(dtype) for _ in range(RANKS)]


def by_levels(tensors, add):
    while len(tensors) > 1:
        half = len(tensors) // 2
        tensors = [add(tensors[rest::half]) for rest in range(half)]
    return tensors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_made_level_by_level_by_every_verb_and_at_every_size(ways, dtype):
    way = ways("lanes", 1)
    for numel, gathered in product([5, 4000, 50_001], [False, True]):
        several = shuffled(numel, dtype)
        expected = by_levels(several, in_order)
        collectives = (way.gathered() if gathered else way).collectives
        tensor = several[RANK].clone()
        collectives.all_reduce(tensor).wait()
        assert torch.equal(tensor, expected)
        for bounds in cuts(numel):
            tensor = several[RANK].clone()
            collectives.reduce_scatter(tensor, bounds).wait()
            slot = collectives.slot(RANK)
            own = slice(bounds[slot], bounds[slot + 1])
            assert torch.equal(tensor[own], expected[own])


def test_a_wire_dtype_rounds_the_sum_of_every_level(ways):
    way = ways("lanes", 1)
    several = shuffled(4001, torch.float32)

    def rounded(tensors):
        return in_order([t.bfloat16().float() for t in tensors]).bfloat16().float()

    expected = by_levels(several, rounded)
    for gathered in (False, True):
        tensor = several[RANK].clone()
        collectives = (way.gathered() if gathered else way).collectives
        collectives.all_reduce(tensor, wire=torch.bfloat16).wait()
        assert torch.equal(tensor, expected)


def test_a_rank_sends_two_messages_a_level_and_no_more_bytes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_plan, "GROUP", 2)
        with make_world("flat", 1) as world:
            before = world.usage()[RANK]
            world.collectives.all_reduce(torch.ones(1 << 14)).wait()
            after = world.usage()[RANK]
    # Of one chunk; directly 2 (M - 1) messages, and as many bytes.
    assert after.cross_messages - before.cross_messages == 2 * (RANKS.bit_length() - 1)
    assert after.cross_bytes - before.cross_bytes == 2 * (RANKS - 1) * (1 << 16) // RANKS
