"""Sums, casts and squares by torch; which kernels a device gets."""

import math
import sys

import pytest
import torch
from kernel_cases import FLOATS, SIZES, bits, far_apart, packed, summed

from mntrain.kernels import MAX_ADDENDS, DeviceKernels, can_add
from zero import norms
from zero.collectives import SingleProcessCollectives
from zero.kernels import add, pack, square_sums

INTEGERS = [torch.uint8, torch.int32, torch.int64]


# Sums.


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_addends_are_added_in_their_order_and_rounded_once(dtype, numel, count):
    addends = far_apart([dtype] * count, numel)
    expected = summed(addends, dtype)
    total = torch.full((numel,), 77, dtype=dtype)
    add(addends, total)
    assert bits(total) == bits(expected)


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        *((dtype, dtype) for dtype in [*FLOATS, torch.int32]),
        *((own, wire) for own in FLOATS[:2] for wire in FLOATS[2:]),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_sum_may_replace_any_addend_and_others_of_a_wire_dtype_are_widened(dtype, wire, count):
    for place in (None, *range(count)):
        dtypes = [dtype if i == place else wire for i in range(count)]
        addends = far_apart(dtypes, 1000)
        before = [addend.clone() for addend in addends]
        total = torch.empty(1000, dtype=dtype) if place is None else addends[place]
        add(addends, total)
        assert bits(total) == bits(summed(before, dtype))
        for index, (addend, was) in enumerate(zip(addends, before, strict=True)):
            assert index == place or bits(addend) == bits(was)


def test_a_16_bit_sum_overflows_only_when_it_is_rounded():
    big = torch.full((3,), 60000.0, dtype=torch.float16)
    total = torch.empty_like(big)
    add([big, big, -big], total)
    assert total.tolist() == big.tolist()
    add([big, big, big], total)
    assert total.tolist() == [math.inf] * 3


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_keep_non_finite_numbers(dtype):
    odd = torch.tensor([math.nan, math.inf, math.inf, -math.inf], dtype=dtype)
    other = torch.tensor([1, 1, -math.inf, 1], dtype=dtype)
    for addends in ([odd, other], [odd, other, torch.ones_like(odd)]):
        total = torch.empty_like(odd)
        add(addends, total)
        assert total.isnan().tolist() == [True, False, True, False]
        assert total[[1, 3]].tolist() == [math.inf, -math.inf]


# Casts and products.


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.1, 3e-5, -0.0])
def test_a_product_is_computed_in_fp32_or_wider_and_rounded_once(dtype, target, scale):
    for numel in SIZES if scale == 0.1 else (1000,):
        (values,) = far_apart([dtype], numel)
        out = torch.full((numel,), 77, dtype=target)
        pack(values, scale, out)
        assert out.equal(packed(values, scale, target))


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_scale_of_zero_turns_non_finite_numbers_into_zeros(dtype, target):
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=dtype)
    out = torch.ones(4, dtype=target)
    pack(odd, 0.0, out)
    assert out.tolist() == [0.0] * 4
    pack(odd, 0.5, out)
    assert out.isnan().tolist() == [True, False, False, False]
    assert out[1:].tolist() == [math.inf, -math.inf, 0.5]


# Squares.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_squares_are_summed_in_fp64(dtype):
    tensors = [torch.randn(numel, dtype=torch.float64).to(dtype) for numel in SIZES]
    sums = square_sums(tensors)
    assert sums.dtype == torch.float64
    expected = [math.fsum(x * x for x in tensor.tolist()) for tensor in tensors]
    assert sums.tolist() == pytest.approx(expected, rel=1e-12, abs=0)
    assert sums[SIZES.index(0)] == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_squares_have_the_same_bits_at_every_address(dtype):
    values, room = torch.randn(100_003).to(dtype), torch.empty(100_010, dtype=dtype)
    found = {float(square_sums([values])) for _ in range(3)}
    for start in range(5):
        moved = room[start : start + len(values)].copy_(values)
        found.add(float(square_sums([moved])))
    assert len(found) == 1


def test_squares_keep_non_finite_numbers_and_neither_overflow_nor_vanish():
    tensors = [torch.tensor([x, 1.0]) for x in (math.nan, math.inf, 3e38)]
    nan, inf, large = square_sums(tensors).tolist()
    assert math.isnan(nan)
    assert inf == math.inf
    assert large == pytest.approx(9e76)
    assert float(square_sums([torch.tensor([1e-42])])) > 0
    assert square_sums([]).tolist() == []


def test_only_norms_off_the_cpu_are_of_the_squares_of_whole_tensors(monkeypatch):
    def known(tensors):  # numbers that nobody else would give
        assert all(tensor.numel() for tensor in tensors)
        return torch.full((len(tensors),), 12.5, dtype=torch.float64)

    monkeypatch.setattr(norms, "square_sums", known)
    afar = [torch.empty(numel, device="meta") for numel in (3, 0, 5)]
    here = [torch.tensor([3.0, 4.0])]
    cases = [(afar, 2.0, 5.0), (here, 2.0, 5.0), ([2 * part for part in here], 1.0, 14.0)]
    for shards, p, expected in [*cases, ([], 2.0, 0.0)]:  # not 3.5 on the CPU
        assert norms.global_norm(SingleProcessCollectives(), shards, p) == expected


# Which kernels a device gets.

CUDA = torch.device("cuda", 0)


def test_the_cpu_gets_torchs_kernels_without_a_try_of_cupy(monkeypatch):
    monkeypatch.setattr(DeviceKernels, "_compile", pytest.fail)
    kernels = DeviceKernels(torch.device("cpu"))
    assert (kernels.name, kernels.why) == ("torch", "torch's kernels: the device is cpu")
    total = torch.empty(2)
    kernels.add([torch.ones(2), torch.ones(2)], total)
    assert total.tolist() == [2.0, 2.0]


def test_without_a_cupy_that_works_kernels_are_torchs_and_the_reason_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    kernels = DeviceKernels(CUDA)
    assert kernels.name == "torch"
    assert "ImportError" in kernels.why
    assert "pip install 'mntrain[cuda12]'" in kernels.why
    for error in (RuntimeError, OSError, AttributeError):

        def fail(self, error=error):
            raise error("the driver is too old\nand much more")

        monkeypatch.setattr(DeviceKernels, "_compile", fail)
        kernels = DeviceKernels(CUDA)
        assert kernels.name == "torch"
        why = f"CuPy does not work: {error.__name__}: the driver is too old"
        assert kernels.why == f"torch's kernels: {why}"


# The arguments of the CUDA kernel.


def test_the_kernel_adds_only_floats_that_the_total_widens():
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    assert can_add([single, half, torch.float16], single)
    assert can_add([double, single, half], double)
    assert not can_add([single, double, single], single)
    assert not can_add([torch.int32] * 3, torch.int32)
    assert not can_add([half, half], half)
    assert can_add([half] * MAX_ADDENDS, half)
    assert not can_add([half] * (MAX_ADDENDS + 1), half)


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e18, 3e19, 1e-12, 1e-22])
def test_norms_of_fp32_are_those_of_fp64_also_where_squares_leave_its_range(scale):
    for numel in (255, 20_000, 300_001):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale
        expected = float(values.double().square().sum().sqrt())
        found = norms.global_norm(SingleProcessCollectives(), [values], 2.0)
        assert found == pytest.approx(expected, rel=1e-7, abs=0)
    values[7] = 2e19  # its square is beyond fp32
    assert norms.global_norm(SingleProcessCollectives(), [values], 2.0) >= 1.9e19
    for odd in (math.inf, math.nan):
        values[-1] = odd
        assert not math.isfinite(norms.global_norm(SingleProcessCollectives(), [values], 2.0))
