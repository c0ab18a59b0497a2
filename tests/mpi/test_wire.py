"""Sums that travel between nodes in a dtype of their own, against the same roundings made here."""

import functools
from itertools import product

import pytest
import torch
from cases import PLACES, RANK, bits, check_bits, cuts, in_order, shard
from worlds import EVERY_WORLD, LAYOUTS, RANKS, VIRTUAL

from mntrain.comm import algorithms

pytestmark = pytest.mark.simulated

FAR = [(20011, "plain"), (20011, "mixed")]
WIRES = [torch.bfloat16, torch.float16]
names = {"ids": lambda dtype: str(dtype).removeprefix("torch.")}


@functools.cache
def addends(numel, dtype=torch.float32, seed=0):
    """Numbers by rank, of more digits than 16 bits hold, some out of the range of fp16."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-26, 18, (RANKS, numel), generator=generator)
    digits = torch.randn(RANKS, numel, generator=generator, dtype=torch.float64)
    return (digits * 2.0 ** exponents.double()).to(dtype)


def expected(nodes, everyone, wire):
    """Round each node's sum, add the nodes' in order, round again; nothing, where there is one."""
    sums = [in_order([everyone[rank] for rank in node]) for node in nodes]
    if len(nodes) == 1:
        return sums[0]
    wide = torch.promote_types(everyone.dtype, torch.float32)
    total = functools.reduce(torch.add, [s.to(wire).to(wide) for s in sums])
    return total.to(wire).to(everyone.dtype)


def same(tensor, other):
    """Bits are the same, but for which NaN it is."""
    nan = tensor.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(bits(tensor[~nan]), bits(other[~nan]))


@pytest.mark.parametrize("wire", WIRES, **names)
@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_each_nodes_sum_is_rounded_and_so_is_the_sum_of_them(ways, algorithm, layout, wire):
    way = ways(algorithm, layout)
    for numel, place in [(0, "plain"), (1, "plain"), (1003, "mixed"), (5003, "odd"), *FAR]:
        everyone = addends(numel)
        total = expected(way.nodes, everyone, wire)
        whole, gathered = (way.lay(everyone[RANK], place) for _ in range(2))
        bounds = [None, cuts(numel)[-1]]
        sharded = [way.lay(everyone[RANK], place) for _ in bounds]
        works = [way.collectives.all_reduce(whole, wire=wire)]
        works += [way.gathered().collectives.all_reduce(gathered, wire=wire)]
        works += [
            way.collectives.reduce_scatter(tensor, cut, wire=wire)
            for tensor, cut in zip(sharded, bounds, strict=True)
        ]
        for work in works:
            work.wait()
        assert same(whole, total), f"all_reduce of {numel}, {place}"
        assert same(gathered, total), f"gathered all_reduce of {numel}, {place}"
        for tensor, cut in zip(sharded, bounds, strict=True):
            mine = shard(way.collectives, numel, cut)
            assert same(tensor[mine], whole[mine]), f"{numel} in {cut}, {place}"
        check_bits(way.world, [whole])


@pytest.mark.parametrize("piece_bytes", [200, pytest.param(1000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "place", [p if p == "mixed" else pytest.param(p, marks=pytest.mark.thorough) for p in PLACES]
)
def test_any_length_of_a_piece(ways, piece_bytes, place):
    everyone = addends(1003)
    for layout, wire, algorithm in product(LAYOUTS, WIRES, ["lanes", "leader"]):
        way = ways(algorithm, layout, piece_bytes)
        several = [way.lay(everyone[RANK], place) for _ in range(3)]
        works = [way.collectives.all_reduce(tensor, wire=wire) for tensor in several[:2]]
        works.append(way.collectives.reduce_scatter(several[2], cuts(1003)[-2], wire=wire))
        for work in works:
            work.wait()
        total = expected(way.nodes, everyone, wire)
        mine = shard(way.collectives, 1003, cuts(1003)[-2])
        assert same(several[0], total)
        assert same(several[1], total)
        assert same(several[2][mine], total[mine])


@pytest.mark.parametrize("wire", [None, torch.float32], ids=str)
@pytest.mark.parametrize("algorithm", algorithms.names())
def test_the_tensors_own_dtype_rounds_nothing(ways, algorithm, wire):
    for layout in VIRTUAL:
        way = ways(algorithm, layout)
        everyone = addends(1003)
        tensor = way.lay(everyone[RANK], "mixed")
        way.collectives.all_reduce(tensor, wire=wire).wait()
        nodes = way.nodes if algorithm in ("leader", "lanes") else [range(RANKS)]
        total = in_order([in_order([everyone[rank] for rank in node]) for node in nodes])
        assert torch.equal(bits(tensor), bits(total))


@pytest.mark.parametrize("wire", WIRES, **names)
def test_fp64_travels_in_16_bits_too(ways, wire):
    for layout, algorithm in product(VIRTUAL, algorithms.names()):
        way = ways(algorithm, layout)
        everyone = addends(1003, torch.float64)
        tensor = everyone[RANK].clone()
        way.collectives.all_reduce(tensor, wire=wire).wait()
        assert same(tensor, expected(way.nodes, everyone, wire))
