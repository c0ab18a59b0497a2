import re
import time
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch
from cases import (
    PLACES,
    RANK,
    UNIT,
    VERBS,
    Case,
    bits,
    cases,
    cuts,
    in_order,
    junk,
    out_of_reach,
    ramp,
    run,
    shard,
)
from worlds import EVERY_WORLD, RANKS, VIRTUAL

from mntrain.comm import algorithms, engine, mpi

pytestmark = pytest.mark.simulated

SIZES = [0, 1, 2, 3, 5, 17, 1000, 70001]
# Where tensors lie makes a difference where a node has several ranks.
EVERY_WAY = [
    pytest.param(*world.values, place, id=f"{world.id}-{place}")
    for world, place in product(EVERY_WORLD, [*PLACES, "messages"])
    if place == "plain" or (world.values[0] in ("leader", "lanes") and world.values[1] != 1)
]
FASTER = ["flat", "leader", "lanes"]  # than the oracle


@pytest.mark.both
@pytest.mark.parametrize(("algorithm", "layout", "place"), EVERY_WAY)
def test_every_verb_at_every_size_twice(ways, algorithm, layout, place):
    """No rank copies from another's private memory where the place is `messages`."""
    way = ways(algorithm, layout)
    apart, place = place == "messages", "plain" if place == "messages" else place
    several = cases(way, SIZES, place=place) + [
        Case(way, "broadcast", numel, root=root, place=place)
        for root, numel in product(range(RANKS), (0, 2, 1000))
    ]
    with out_of_reach() if apart else nullcontext():
        run(way.world, several)
        run(way.world, several)  # on the same tensors


@pytest.mark.parametrize("dtype", UNIT, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("algorithm", algorithms.names())
def test_every_dtype(ways, algorithm, dtype):
    for layout, place in product(VIRTUAL, ["plain", "mixed"]):
        way = ways(algorithm, layout)
        for one in (way, way.gathered()):
            run(way.world, cases(one, [2, 5003], dtype, roots=[RANKS - 1], place=place))


def test_algorithms_may_change_from_call_to_call(ways):
    way = ways("lanes", VIRTUAL[-1])
    several = [
        case
        for algorithm, piece_bytes in product(algorithms.names(), [64, 4096, 1 << 20])
        for case in cases(way.by(algorithm, piece_bytes), [5, 1003], roots=[RANKS - 1])
    ]
    run(way.world, several)


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_shards_lie_where_the_caller_cuts(ways, algorithm, layout):
    way = ways(algorithm, layout)
    several = [
        Case(one, verb, numel, bounds=bounds, place=place)
        for one in (way, way.gathered())
        for numel, place in [(0, "plain"), (17, "plain"), (1003, "mixed"), (9001, "mixed")]
        for bounds in cuts(numel)
        for verb in ("reduce_scatter", "all_gather")
    ]
    run(way.world, several)
    run(way.world, several)  # on the same tensors


def test_bounds_are_the_callers_again_at_once(ways):
    collectives = ways("lanes", VIRTUAL[-1]).collectives
    tensor = junk(70001)
    bounds = cuts(len(tensor))[-1]
    mine = shard(collectives, len(tensor), bounds)
    tensor[mine] = ramp(0, len(tensor))[mine]
    work = collectives.all_gather(tensor, bounds)
    bounds.clear()
    work.wait()
    assert torch.equal(tensor, ramp(0, len(tensor)))


def signed_powers(numel, dtype):
    """Return what every rank adds, by rank: far apart in size, often cancelling."""
    generator = torch.Generator().manual_seed(11)
    exponents = 30 * torch.randint(-1, 2, (RANKS, numel), generator=generator)
    signs = 2 * torch.randint(0, 2, (RANKS, numel), generator=generator) - 1
    return (signs * torch.pow(2.0, exponents.double())).to(dtype)


@pytest.mark.parametrize("piece_bytes", [600, 1 << 20])
@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_sums_are_made_in_the_order_of_members_wherever_the_cut(
    ways, algorithm, layout, piece_bytes
):
    way = ways(algorithm, layout, piece_bytes)  # a lane is several pieces, or one
    dtypes = torch.float32, torch.float64, torch.bfloat16
    for dtype, place in product(dtypes, ["plain", "mixed"]):
        everyone = signed_powers(1003, dtype)
        if RANKS > 2:
            assert not torch.equal(in_order([*everyone]), in_order([*everyone.flip(0)]))
        expected = in_order([in_order([everyone[rank] for rank in node]) for node in way.nodes])
        for collectives in (way.collectives, way.gathered().collectives):
            whole = way.lay(everyone[RANK], place)
            all_bounds = (None, *cuts(1003)[-4:])
            sharded = [(way.lay(everyone[RANK], place), bounds) for bounds in all_bounds]
            works = [collectives.all_reduce(whole)]
            works += [collectives.reduce_scatter(*each) for each in sharded]
            for work in works:
                work.wait()
            assert torch.equal(bits(whole), bits(expected)), dtype
            for tensor, bounds in sharded:
                mine = shard(way.collectives, 1003, bounds)
                assert torch.equal(bits(tensor[mine]), bits(whole[mine])), bounds


@pytest.mark.parametrize("piece_bytes", [8, 24, 200])
@pytest.mark.parametrize(
    "scheme", [("flat", None), *product(["leader", "lanes"], VIRTUAL[-2:])], ids=str
)
def test_any_length_of_a_piece(ways, scheme, piece_bytes):
    way = ways(*scheme, piece_bytes)
    for dtype, place in product((torch.float32, torch.int64), ("plain", "shared", "mixed")):
        run(way.world, cases(way, [99], dtype, roots=[RANKS - 1], place=place))


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_collectives_that_wake_no_thread(ways, monkeypatch, algorithm, layout):
    monkeypatch.setattr("mntrain.comm.world_collectives.NO_WAKE_BYTES", 1 << 20)
    way = ways(algorithm, layout, 200)
    for place in PLACES:
        several = cases(way, [3, 1003], roots=[RANKS - 1], place=place)
        for case in several:
            run(way.world, [case])
        run(way.world, several)


def test_ranks_that_wake_their_threads_at_different_times_do_not_block_each_other(
    ways, monkeypatch
):
    """Some ranks wait at once, others after more collectives, which may wake the thread."""
    way = ways("lanes", VIRTUAL[-1])
    for limit, late in product((0, 1 << 20), range(RANKS)):
        monkeypatch.setattr("mntrain.comm.world_collectives.NO_WAKE_BYTES", limit)
        for small in (way, way.gathered()):
            first, second = cases(small, [17], roots=[0])[:2]
            works = [first.launch()]
            if late != RANK:
                works[0].wait()
            works.append(second.launch())
            if late == RANK:
                time.sleep(0.01)
            works[1].wait()
            works[0].wait()
            first.check()
            second.check()
        way.arena.clear()


@pytest.mark.parametrize("layout", VIRTUAL[-2:])
def test_more_pieces_than_there_are_tags(ways, monkeypatch, layout):
    monkeypatch.setattr(engine, "CHUNK_TAGS", 16)
    monkeypatch.setattr(mpi, "CHUNK_TAGS", 16)
    for algorithm in FASTER:
        way = ways(algorithm, layout, 64)
        several = [c for place in PLACES for c in cases(way, [403], roots=[0], place=place)]
        run(way.world, several)


@pytest.mark.parametrize(("algorithm", "layout"), EVERY_WORLD)
def test_a_message_that_is_longer_than_mpi_can_count(ways, monkeypatch, algorithm, layout):
    monkeypatch.setattr(mpi, "MESSAGE_BYTES", 3333)  # cuts through elements
    way = ways(algorithm, layout)
    run(way.world, cases(way, [1003, 10003], roots=[0, RANKS - 1]))


@pytest.mark.parametrize("place", ["plain", "mixed"])
@pytest.mark.parametrize("algorithm", FASTER)
def test_many_under_way_arrive_in_any_order_of_waiting(ways, algorithm, place):
    way = ways(algorithm, VIRTUAL[-1])
    several = [c for numel in range(12) for c in cases(way, [numel], roots=[0], place=place)]
    works = [case.launch() for case in several]
    order = torch.randperm(len(works), generator=torch.Generator().manual_seed(RANK))
    for index in order.tolist():
        works[index].wait()
        several[index].check()
        works[index].wait()  # again: it returns at once


def test_a_tensor_is_the_callers_again_when_its_work_is_done(ways):
    """Also while others are not done: nobody reads or writes it behind the caller's back."""
    way = ways("lanes", VIRTUAL[-1])
    tensor = way.lay(torch.zeros(20011), "shared")
    for turn in range(30):
        tensor.fill_(RANK + turn)
        time.sleep(0.001 * ((RANK + turn) % 3))
        way.collectives.all_reduce(tensor).wait()
        found = tensor.clone()
        tensor.fill_(-1e6)
        assert set(found.tolist()) == {RANKS * (RANKS - 1) / 2 + RANKS * turn}


@pytest.mark.parametrize("turn", range(3))  # of the rank whose thread progresses it alone
@pytest.mark.parametrize("algorithm", algorithms.names())
def test_a_tensor_of_inference_mode_is_reduced_in_place_by_any_thread(ways, algorithm, turn):
    world = ways(algorithm, VIRTUAL[-1]).collectives
    for numel in (5, 100_000):
        with torch.inference_mode():
            whole = torch.full((numel,), 2.0**RANK)
            works = [world.all_reduce(part) for part in (whole, whole.clone())]
            time.sleep(0.5 * (turn == RANK))
            works[0].wait()
        works[1].wait()
        assert set(whole.tolist()) == {2.0**RANKS - 1}


def test_a_parameter_that_requires_grad_is_reduced_in_place(ways):
    tensor = torch.nn.Parameter(torch.ones(3))
    ways().collectives.all_reduce(tensor).wait()
    assert tensor.tolist() == [RANKS] * 3


def refused():
    """Yield calls that cannot be made, and what is said of them."""
    cuts_nothing = [
        (),
        (7,),
        (*[0] * (RANKS - 1), 7),
        (*[0] * (RANKS + 1), 7),
        (*[0] * RANKS, 6),
        (*[0] * RANKS, 8),
        (1, *[7] * RANKS),
        (-1, *[7] * RANKS),
        (0, *[8] * (RANKS - 1), 7),
        (0, *range(RANKS - 1, 0, -1), 7) if RANKS > 2 else (7, *[0] * RANKS),
    ]
    for verb, bounds in product(["reduce_scatter", "all_gather"], cuts_nothing):
        words = f"bounds {bounds} do not cut 7 elements into {RANKS} shards: give {RANKS + 1} "
        words += "indices that never decrease, from 0 to 7"
        yield verb, torch.zeros(7), (bounds,), re.escape(words)
    odd = torch.zeros(2, 3), torch.zeros(()), torch.zeros(6)[::2], torch.zeros(1).expand(3)
    words = (
        r"a flat contiguous tensor, not one of shape .* and strides .*: give the view\(-1\) of a"
    )
    for verb, tensor in product(VERBS, odd):
        yield verb, tensor, (), words
    number = torch.zeros(3, dtype=torch.complex64)
    words = r"lazily conjugated or negated .*: give its resolve_conj\(\)\.resolve_neg\(\)$"
    for verb, tensor in product(VERBS, (number.conj(), torch._neg_view(torch.zeros(3)))):
        yield verb, tensor, (), words
    words = r"torch\.complex64 does not travel in torch\.bfloat16: leave wire= out"
    yield "all_reduce", number, (torch.bfloat16,), words
    yield "reduce_scatter", number, (None, torch.bfloat16), words
    for root in (-1, RANKS):
        words = f"root {root} is no rank of this world: 0 to {RANKS - 1}"
        yield "broadcast", torch.zeros(1), (root,), words


def test_calls_with_numbers_of_numpy_are_those_with_numbers_of_python(ways):
    """Their digests are cached by value, and depend on the text."""
    world = ways("lanes", VIRTUAL[-1]).collectives
    bounds = cuts(17)[-1]
    world.broadcast(junk(17), RANKS - 1).wait()
    world.broadcast(junk(17), np.int64(RANKS - 1)).wait()
    world.all_gather(junk(17), bounds).wait()
    world.all_gather(junk(17), np.array(bounds)).wait()
    calls = [repr(ticket.signature) for ticket in world._stream.history][-4:]
    assert [calls[0], calls[2]] == [calls[1], calls[3]]


def test_calls_that_cannot_be_made_are_refused(ways):
    for verb, tensor, given, words in refused():
        with pytest.raises(ValueError, match=words):
            getattr(ways().collectives, verb)(tensor, *given)
