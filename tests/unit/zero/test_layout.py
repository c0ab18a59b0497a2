import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero.layout import (
    LEAST_BUCKETS,
    MIB,
    ParameterSpec,
    lay_out,
    split,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
BUCKET_BYTES = st.integers(1, 400)
SHARDS = st.integers(1, 9)
FEWER = settings(max_examples=40)


def models(least):
    """Lists of specs whose dimensions are `least` or more."""
    shapes = st.lists(st.integers(least, 6), max_size=3).map(tuple)
    kinds = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12)
    return kinds.map(lambda drawn: [ParameterSpec(f"p{i}", *kind) for i, kind in enumerate(drawn)])


MODELS = models(least=0)
NO_EMPTY_PARAMETERS = models(least=1)
LOADS = st.lists(st.integers(0, 300), min_size=1, max_size=9)
CUTS = st.one_of(  # shards and loads: by element, and by parameter
    SHARDS.map(lambda shards: (shards, None)),
    LOADS.map(lambda loads: (len(loads), loads)),
)


def names(bucket):
    return [entry.spec.name for entry in bucket.entries]


def owned(plan, slot):
    """The pieces of a slot, bucket by bucket."""
    return [bucket.pieces(*bucket.shard(slot)) for bucket in plan]


def elements(plan, slot):
    return sum(stop - start for start, stop in (bucket.shard(slot) for bucket in plan))


@given(MODELS, BUCKET_BYTES)
def test_parameters_of_one_dtype_fill_a_bucket_up_to_the_limit_last_first(specs, bucket_bytes):
    plan = lay_out(specs, bucket_bytes)
    for bucket in plan:
        start = 0
        for entry in bucket.entries:
            assert (entry.start, entry.stop) == (start, start + math.prod(entry.spec.shape))
            start = entry.stop
        assert bucket.numel == start
        assert {entry.spec.dtype for entry in bucket.entries} == {bucket.dtype}
        if bucket.numel * bucket.dtype.itemsize > bucket_bytes:
            assert len([entry for entry in bucket.entries if entry.spec.numel]) == 1
    for dtype in DTYPES:
        expected = [spec.name for spec in reversed(specs) if spec.dtype == dtype]
        for bucket in plan:
            if bucket.dtype == dtype:  # within one, what keeps the others at even addresses does
                run, expected = expected[: len(bucket.entries)], expected[len(bucket.entries) :]
                numels = {entry.spec.name: entry.spec.numel for entry in bucket.entries}
                assert names(bucket) == sorted(run, key=lambda name: numels[name] % 64 != 0)
        assert not expected


@given(NO_EMPTY_PARAMETERS, BUCKET_BYTES)
def test_a_bucket_is_closed_when_the_next_does_not_fit_and_comes_when_it_is_full(
    specs, bucket_bytes
):
    plan = lay_out(specs, bucket_bytes)
    for dtype in DTYPES:
        run = [bucket for bucket in plan if bucket.dtype == dtype]
        for bucket, following in pairwise(run):
            next_one = max(following.entries, key=lambda entry: int(entry.spec.name[1:]))
            both = bucket.numel + next_one.spec.numel
            assert both * dtype.itemsize > bucket_bytes
    backward = [spec.name for spec in reversed(specs)]
    filled = [max(backward.index(name) for name in names(bucket)) for bucket in plan]
    assert filled == sorted(filled)


def specs_of(*numels):
    return [ParameterSpec(f"p{i}", (numel,), torch.float32) for i, numel in enumerate(numels)]


@pytest.mark.parametrize(
    ("numels", "bucket_bytes", "expected"),
    [
        ((5, 3, 4, 2), 32, [["p3", "p2"], ["p1", "p0"]]),  # the picture
        ((1, 100, 1), 16, [["p2"], ["p1"], ["p0"]]),  # one larger than a bucket
    ],
)
def test_known_plans(numels, bucket_bytes, expected):
    assert [names(bucket) for bucket in lay_out(specs_of(*numels), bucket_bytes)] == expected


# Shards.


@FEWER
@given(MODELS, BUCKET_BYTES, CUTS)
def test_pieces_of_all_slots_cover_every_element_once_where_its_parameter_lies(
    specs, bucket_bytes, cut
):
    plan, uncut = lay_out(specs, bucket_bytes, *cut), lay_out(specs, bucket_bytes)
    assert [sorted(names(bucket)) for bucket in plan] == [sorted(names(bucket)) for bucket in uncut]
    seen = {spec.name: [0] * spec.numel for spec in specs}
    for bucket in plan:
        assert len(bucket.bounds) == cut[0] + 1
        assert (bucket.bounds[0], bucket.bounds[-1]) == (0, bucket.numel)
        assert list(bucket.bounds) == sorted(bucket.bounds)
        if cut[1] is None:
            assert bucket.bounds == split(bucket.numel, cut[0])
        entries = {entry.spec.name: entry for entry in bucket.entries}
        for slot in range(cut[0]):
            place, high = bucket.shard(slot)
            for piece in bucket.pieces(place, high):  # side by side, over the whole shard
                entry = entries[piece.spec.name]
                assert piece.start == place
                assert piece.start - entry.start == piece.low
                assert 0 <= piece.low < piece.high <= entry.spec.numel
                assert piece.whole == ((piece.low, piece.high) == (0, entry.spec.numel))
                place += piece.numel
                for element in range(piece.low, piece.high):
                    seen[piece.spec.name][element] += 1
            assert place == high
    assert all(count == 1 for counts in seen.values() for count in counts)


@FEWER
@given(MODELS, BUCKET_BYTES, LOADS)
def test_by_parameter_no_slot_gets_what_another_could_bear(specs, bucket_bytes, loads):
    plan = lay_out(specs, bucket_bytes, len(loads), loads)
    totals = [load + elements(plan, slot) for slot, load in enumerate(loads)]
    largest = max(spec.numel for spec in specs)
    for slot, (total, load) in enumerate(zip(totals, loads, strict=True)):
        # Who got a parameter had the least before it, so no more than the mean.
        assert total == load or total <= sum(totals) / len(totals) + largest
        pieces = [piece for found in owned(plan, slot) for piece in found]
        assert all(piece.whole for piece in pieces)
        if pieces:  # the last one dealt is the smallest, and nobody had less then
            assert total - min(piece.numel for piece in pieces) <= min(totals)


def test_the_cuts_of_the_picture():
    specs = specs_of(5, 3)
    [by_element] = lay_out(specs, 32, 3)
    assert by_element.bounds == (0, 2, 5, 8)
    pieces = by_element.pieces(*by_element.shard(1))
    assert [(p.spec.name, p.low, p.high) for p in pieces] == [("p1", 2, 3), ("p0", 0, 2)]
    [by_parameter] = lay_out(specs, 32, 3, [0, 0, 0])
    lengths = [stop - start for start, stop in pairwise(by_parameter.bounds)]
    assert sorted(lengths) == [0, 3, 5]


def test_a_small_model_is_laid_into_several_buckets_so_that_they_overlap():
    layers = specs_of(*[MIB // 4] * 16)  # a MiB each
    plan = lay_out(layers, 25 * MIB)
    # Of those at the ends one half: what waits to leave first, and what is waited for last.
    assert [bucket.nbytes for bucket in plan] == [MIB, *[2 * MIB] * (LEAST_BUCKETS - 1), MIB]
    assert len(lay_out(layers[:4], 25 * MIB)) == 4
    assert len(lay_out(layers[:4], 2 * MIB)) == 4  # not below a MiB, nor above an eighth
    [tiny] = lay_out(specs_of(*[8] * 16), 25 * MIB)
    assert len(tiny.entries) == 16
