import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero.layout import Spec, plan_buckets, split

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
BUCKET_BYTES = st.integers(1, 400)


def models(least):
    """Lists of specs whose dimensions are `least` or more."""
    shapes = st.lists(st.integers(least, 6), max_size=3).map(tuple)
    kinds = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12)
    return kinds.map(lambda drawn: [Spec(f"p{i}", *kind) for i, kind in enumerate(drawn)])


MODELS = models(least=0)
NO_EMPTY_PARAMETERS = models(least=1)


def names(bucket):
    return [entry.spec.name for entry in bucket.entries]


@given(st.integers(0, 10**12), st.integers(1, 300))
def test_split_covers_everything_in_parts_equal_to_within_one(numel, parts):
    bounds = split(numel, parts)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, numel, parts)
    assert set(sizes) <= {numel // parts, -(-numel // parts)}


def test_split_into_the_shards_of_the_picture():
    assert split(8, 3) == (0, 2, 5, 8)


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((0,), 0), ((3, 0, 2), 0), ((2, 3, 4), 24)])
def test_a_spec_counts_its_elements(shape, numel):
    assert Spec("p", shape, torch.float32).numel == numel


@given(MODELS, BUCKET_BYTES)
def test_every_parameter_has_one_place(specs, bucket_bytes):
    placed = [e.spec for bucket in plan_buckets(specs, bucket_bytes) for e in bucket.entries]
    assert sorted(placed, key=lambda spec: spec.name) == sorted(specs, key=lambda spec: spec.name)


@given(MODELS, BUCKET_BYTES)
def test_entries_lie_side_by_side_and_fill_their_bucket(specs, bucket_bytes):
    for bucket in plan_buckets(specs, bucket_bytes):
        start = 0
        for entry in bucket.entries:
            assert (entry.start, entry.stop) == (start, start + math.prod(entry.spec.shape))
            start = entry.stop
        assert bucket.numel == start


@given(MODELS, BUCKET_BYTES)
def test_a_bucket_holds_one_dtype(specs, bucket_bytes):
    for bucket in plan_buckets(specs, bucket_bytes):
        assert {entry.spec.dtype for entry in bucket.entries} == {bucket.dtype}


@given(MODELS, BUCKET_BYTES)
def test_only_a_parameter_larger_than_a_bucket_exceeds_the_limit(specs, bucket_bytes):
    for bucket in plan_buckets(specs, bucket_bytes):
        if bucket.numel * bucket.dtype.itemsize > bucket_bytes:
            assert len([entry for entry in bucket.entries if entry.spec.numel]) == 1


@given(NO_EMPTY_PARAMETERS, BUCKET_BYTES)
def test_a_bucket_is_closed_only_when_the_next_parameter_does_not_fit(specs, bucket_bytes):
    plan = plan_buckets(specs, bucket_bytes)
    for dtype in DTYPES:
        run = [bucket for bucket in plan if bucket.dtype == dtype]
        for bucket, following in pairwise(run):
            both = bucket.numel + following.entries[0].spec.numel
            assert both * dtype.itemsize > bucket_bytes


@given(MODELS, BUCKET_BYTES)
def test_parameters_of_a_dtype_come_last_first(specs, bucket_bytes):
    plan = plan_buckets(specs, bucket_bytes)
    for dtype in DTYPES:
        placed = [name for bucket in plan if bucket.dtype == dtype for name in names(bucket)]
        assert placed == [spec.name for spec in reversed(specs) if spec.dtype == dtype]


@given(NO_EMPTY_PARAMETERS, BUCKET_BYTES)
def test_buckets_come_in_the_order_in_which_backward_fills_them(specs, bucket_bytes):
    backward = [spec.name for spec in reversed(specs)]
    filled = [
        max(backward.index(name) for name in names(bucket))
        for bucket in plan_buckets(specs, bucket_bytes)
    ]
    assert filled == sorted(filled)


@given(MODELS, BUCKET_BYTES)
def test_equal_specs_give_equal_plans(specs, bucket_bytes):
    again = [Spec(spec.name, tuple(spec.shape), spec.dtype) for spec in specs]
    assert plan_buckets(specs, bucket_bytes) == plan_buckets(again, bucket_bytes)


def test_the_plan_of_the_picture():
    specs = [
        Spec(name, (n,), torch.float32) for name, n in [("a", 5), ("b", 3), ("c", 4), ("d", 2)]
    ]
    assert [names(bucket) for bucket in plan_buckets(specs, 32)] == [["d", "c"], ["b", "a"]]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own():
    specs = [Spec(name, (n,), torch.float32) for name, n in [("a", 1), ("b", 100), ("c", 1)]]
    assert [names(bucket) for bucket in plan_buckets(specs, 16)] == [["c"], ["b"], ["a"]]


def test_dtypes_fill_buckets_of_their_own_side_by_side():
    kinds = [torch.float32, torch.bfloat16] * 2
    specs = [Spec(f"p{i}", (4,), kind) for i, kind in enumerate(kinds)]
    assert [names(bucket) for bucket in plan_buckets(specs, 1024)] == [["p3", "p1"], ["p2", "p0"]]


def test_no_parameters_need_no_bucket():
    assert plan_buckets([], 1024) == ()
