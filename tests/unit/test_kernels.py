"""Sums, casts and squares, on the CPU and on a GPU; which kernels a device gets."""

import importlib.util
import math
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from gpu.place import ON, gpu
from host_kernels import COMPILER, sums_on_the_host
from kernel_cases import FLOATS, SIZES, bits, far_apart, packed, summed
from torch import nn

from mntrain.device_kernels import MAX_ADDENDS, DeviceKernels, can_add
from zero.collectives import SingleProcessCollectives
from zero.kernels import add, pack, power_sum, square_sums
from zero.optimizer import ZeroOptimizer

pytestmark = pytest.mark.xdist_group("kernels")  # compiled once

WITH_COMPILER = pytest.mark.skipif(COMPILER is None, reason="no g++ here")
WITH_CUPY = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="no CuPy here")
NARROW = [torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param(ON, marks=gpu, id="gpu")]
FEW = [0, 1, 7, 2048, 2049, 4_099]  # elements, for the threads of the host


@pytest.fixture(
    scope="module",
    params=[
        "torch",
        pytest.param("source", marks=[WITH_COMPILER, pytest.mark.thorough]),
        pytest.param("torch on gpu", marks=gpu),
        pytest.param("cupy", marks=[*gpu, WITH_CUPY]),
    ],
)
def kernels(request, tmp_path_factory):
    """Sums by torch, by the source of the CUDA kernel, and by CuPy, with the sizes to try."""
    if request.param == "source":
        sums = sums_on_the_host(tmp_path_factory.mktemp("kernels"))
        return SimpleNamespace(add=sums, device="cpu", sizes=FEW, counts=[1, 3, 4], own=True)
    sums = cupy_kernels().add if request.param == "cupy" else add
    device = "cpu" if request.param == "torch" else ON
    sizes = [*FEW, 20_003] if request.param == "torch" else SIZES
    return SimpleNamespace(add=sums, device=device, sizes=sizes, counts=[1, 2, 3, 5], own=False)


def cupy_kernels():
    made = DeviceKernels(torch.device("cuda", 0))
    assert made.name == "cupy", made.why
    return made


def placed(tensors, offset, device):
    """Return tensors on a device that begin `offset` elements after an aligned address."""
    found = []
    for tensor in tensors:
        memory = torch.zeros(len(tensor) + 16, dtype=tensor.dtype, device=device)
        found.append(memory[offset : offset + len(tensor)].copy_(tensor))
    return found


# Sums.


def test_addends_are_added_in_their_order_and_rounded_once(kernels):
    integers = [] if kernels.own else [torch.uint8, torch.int32, torch.int64]
    for dtype, numel, count in product([*FLOATS, *integers], kernels.sizes, kernels.counts):
        if numel > 10_000 and count != 3:
            continue
        addends = far_apart([dtype] * count, numel)
        for offset in (0, 1) if numel < 10_000 else (1,):
            total = torch.ones(numel + 2, dtype=dtype, device=kernels.device)
            kernels.add(placed(addends, offset, kernels.device), total[1:-1])
            assert bits(total[1:-1]) == bits(summed(addends, dtype)), (dtype, numel, count)
            assert (total[0], total[-1]) == (1, 1)  # nothing beside it is written


def test_the_sum_may_replace_any_addend_and_the_others_may_be_narrower(kernels):
    equal = [(dtype, dtype) for dtype in FLOATS]
    for (own, wire), count in product([*equal, *product(FLOATS[:2], NARROW)], kernels.counts):
        for place in (None, *range(count)):
            addends = far_apart([own if i == place else wire for i in range(count)], 10_003)
            there = placed(addends, 0, kernels.device)
            total = torch.empty(10_003, dtype=own, device=kernels.device)
            total = total if place is None else there[place]
            kernels.add(there, total)
            assert bits(total) == bits(summed(addends, own)), (own, wire, count, place)
            for index, (now, before) in enumerate(zip(there, addends, strict=True)):
                assert index == place or bits(now) == bits(before)


def test_a_16_bit_sum_overflows_only_when_it_is_rounded(kernels):
    big = torch.full((3,), 60000.0, dtype=torch.float16, device=kernels.device)
    total = torch.empty_like(big)
    kernels.add([big, big, -big], total)
    assert total.tolist() == big.tolist()
    kernels.add([big, big, big], total)
    assert total.tolist() == [math.inf] * 3


def test_sums_keep_non_finite_and_subnormal_numbers(kernels):
    numbers = [math.nan, math.inf, math.inf, -math.inf], [1, 1, -math.inf, 1], [0, 0, 0, 0]
    for dtype, count in product(FLOATS, [3] if kernels.own else [2, 3]):
        rows = numbers[:count]
        addends = [torch.tensor(row, dtype=dtype, device=kernels.device) for row in rows]
        total = torch.empty_like(addends[0])
        kernels.add(addends, total)
        assert total.isnan().tolist() == [True, False, True, False]
        assert total[[1, 3]].tolist() == [math.inf, -math.inf]
    small = torch.tensor([1e-40, 3e-42], device=kernels.device)
    total = torch.empty_like(small)
    kernels.add([small, small, small], total)
    assert (total > 2e-42).all()
    assert bits(total) == bits(summed([small.cpu()] * 3, torch.float32))


def test_every_16_bit_number_is_widened_exactly_and_fp32_is_rounded_to_even(kernels):
    patterns = torch.arange(-(1 << 31), 1 << 31, 65_521 // 2).to(torch.int32)  # all differ
    for dtype in NARROW:
        every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
        numbers = torch.cat([patterns.view(torch.float32), ties(dtype)])
        for values, target in ((every, torch.float32), (every.float(), dtype), (numbers, dtype)):
            out = torch.empty(len(values), dtype=target, device=kernels.device)
            kernels.add([values.to(kernels.device)], out)
            expected, found = values.to(target), out.cpu()
            assert torch.equal(found.isnan(), expected.isnan())
            finite = ~expected.isnan()
            assert bits(found[finite]) == bits(expected[finite]), dtype


def ties(dtype):
    """Return the numbers half-way between neighbours of a dtype."""
    numbers = torch.arange(0, (1 << 15) - 1).to(torch.int16).view(dtype).float()
    low, high = numbers[:-1], numbers[1:]
    middle = (low.double() + high.double()) / 2
    return middle[middle.isfinite()].float()


# Casts and products.


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_is_computed_in_fp32_or_wider_and_rounded_once(device):
    scales = [*product([0.1], [0, 1], SIZES[:-1]), *product([1.0, 0.1, 3e-5, -0.0], [0], [20_003])]
    for dtype, target, (scale, offset, numel) in product(FLOATS, FLOATS, scales):
        (values,) = far_apart([dtype], numel)
        (out,) = placed([torch.ones(numel, dtype=target)], offset, device)
        pack(*placed([values], offset, device), scale, out)
        expected = packed(values, scale, target)
        assert out.cpu().equal(expected), (dtype, target, scale)
        assert scale == 0 or bits(out) == bits(expected), (dtype, target, scale)


@pytest.mark.parametrize("device", DEVICES)
def test_a_scale_of_zero_turns_non_finite_numbers_into_zeros(device):
    for dtype, target in product(FLOATS, FLOATS):
        odd = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=dtype, device=device)
        out = torch.ones(4, dtype=target, device=device)
        pack(odd, 0.0, out)
        assert out.tolist() == [0.0] * 4
        pack(odd, 0.5, out)
        assert out.isnan().tolist() == [True, False, False, False]
        assert out[1:].tolist() == [math.inf, -math.inf, 0.5]
    small = torch.tensor([1e-40, 3e-42], device=device)
    total = torch.empty_like(small)
    pack(small, 0.5, total)
    assert bits(total) == bits(packed(small.cpu(), 0.5, torch.float32))


# Squares.


@pytest.mark.parametrize("device", DEVICES)
def test_squares_of_many_tensors_are_those_of_fp64(device):
    lengths = [0, 1, 7, 65_535, 65_536, 65_537, 1_000_003, *range(1, 200)]
    tensors = []
    for index, numel in enumerate(lengths):
        dtype = FLOATS[index % len(FLOATS)]
        tensors += placed(far_apart([dtype], numel), index % 3, device)
    expected = torch.stack([tensor.double().square().sum() for tensor in tensors])
    found = square_sums(tensors)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert (square_sums(tensors[:1]) == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_squares_have_the_same_bits_at_every_address_and_beside_any_tensors(device):
    for dtype in FLOATS:
        values = far_apart([dtype], 1_000_003 if device == "cuda" else 100_003)
        expected = float(square_sums(placed(values, 0, device)))
        for offset in range(9):
            (moved,) = placed(values, offset, device)
            others = placed(far_apart([dtype] * offset, 5000 + offset), 0, device)
            assert float(square_sums([*others, moved])[-1]) == expected, (dtype, offset)


@pytest.mark.parametrize("device", DEVICES)
def test_squares_keep_non_finite_numbers_and_neither_overflow_nor_vanish(device):
    numbers = (math.nan, math.inf, 3e38, 1e-42)
    nan, inf, large, small = square_sums([torch.tensor([x], device=device) for x in numbers])
    assert math.isnan(nan)
    assert inf == math.inf
    assert large == pytest.approx(9e76)
    assert small > 0
    assert square_sums([]).tolist() == []


def test_only_norms_off_the_cpu_are_of_the_squares_of_whole_tensors(monkeypatch):
    def known(tensors):  # numbers that nobody else would give
        assert all(tensor.numel() for tensor in tensors)
        return torch.full((len(tensors),), 12.5, dtype=torch.float64)

    monkeypatch.setattr("zero.kernels.square_sums", known)
    afar = [torch.empty(numel, device="meta") for numel in (3, 0, 5)]
    here = [torch.tensor([3.0, 4.0])]
    cases = [(afar, 2.0, 5.0), (here, 2.0, 5.0), ([2 * part for part in here], 1.0, 14.0)]
    for shards, p, expected in [*cases, ([], 2.0, 0.0)]:  # not 3.5 on the CPU
        assert float(power_sum(shards, p)) == expected**p


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e18, 3e19, 1e-12, 1e-22])
def test_norms_of_fp32_are_those_of_fp64_also_where_squares_leave_its_range(scale):
    for numel in (255, 20_000, 300_001):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale
        expected = float(values.double().square().sum().sqrt())
        found = math.sqrt(power_sum([values], 2.0))
        assert found == pytest.approx(expected, rel=1e-7, abs=0)
    values[7] = 2e19  # its square is beyond fp32
    assert math.sqrt(power_sum([values], 2.0)) >= 1.9e19
    for odd in (math.inf, math.nan):
        values[-1] = odd
        assert not math.isfinite(math.sqrt(power_sum([values], 2.0)))


@pytest.mark.parametrize("device", DEVICES[1:])
def test_every_stage_has_the_norm_of_a_step(device):
    for dtype in FLOATS[:3]:
        zero, one, two = (norm_of_a_step(stage, dtype, device) for stage in (0, 1, 2))
        assert one == two
        # At stage 0 parameters have other addresses, for which a GPU may select another kernel.
        assert one == pytest.approx(zero, rel=1e-2 if dtype.itemsize < 4 else 1e-5)


def norm_of_a_step(stage, dtype, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(501, 301), nn.GELU(), nn.Linear(301, 7)).to(device, dtype)
    parameters, group = model.named_parameters(), SingleProcessCollectives()
    optimizer = ZeroOptimizer(parameters, torch.optim.SGD, group, stage=stage, lr=0.1)
    model(torch.randn(5, 501).to(device, dtype)).square().mean().backward()
    return optimizer.step().grad_norm


# Which kernels a device gets, and what they leave to torch.


def test_the_cpu_gets_torchs_kernels_without_a_try_of_cupy(monkeypatch):
    monkeypatch.setattr(DeviceKernels, "_compile", pytest.fail)
    kernels = DeviceKernels(torch.device("cpu"))
    assert (kernels.name, kernels.why) == ("torch", "torch's kernels: the device is cpu")
    total = torch.empty(2)
    kernels.add([torch.ones(2), torch.ones(2)], total)
    assert total.tolist() == [2.0, 2.0]


def test_without_a_cupy_that_works_kernels_are_torchs_and_the_reason_is_one_line(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setitem(sys.modules, "cupy", None)
    kernels = DeviceKernels(cuda)
    assert kernels.name == "torch"
    assert "ImportError" in kernels.why
    assert "pip install cupy-cuda12x" in kernels.why

    def fail(self):
        raise OSError("the driver is too old\nand much more")

    monkeypatch.setattr(DeviceKernels, "_compile", fail)
    why = "torch's kernels: CuPy does not work: OSError: the driver is too old"
    assert (DeviceKernels(cuda).name, DeviceKernels(cuda).why) == ("torch", why)


def test_the_kernel_adds_only_floats_that_the_total_widens():
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    assert can_add([single, half, torch.float16], single)
    assert can_add([double, single, half], double)
    assert not can_add([single, double, single], single)
    assert not can_add([torch.int32] * 3, torch.int32)
    assert not can_add([half, half], half)
    assert can_add([half] * MAX_ADDENDS, half)
    assert not can_add([half] * (MAX_ADDENDS + 1), half)


@pytest.fixture(params=[pytest.param("cupy", marks=[*gpu, WITH_CUPY])])
def cupy(request):
    return cupy_kernels()


@pytest.mark.parametrize("count", [MAX_ADDENDS, MAX_ADDENDS + 1])
def test_any_number_of_addends_is_added(cupy, count):
    addends = far_apart([torch.bfloat16] * count, 1000)
    total = torch.empty(1000, dtype=torch.bfloat16, device="cuda")
    cupy.add(placed(addends, 0, "cuda"), total)
    assert bits(total) == bits(summed(addends, torch.bfloat16))


def test_kernels_run_on_the_current_stream_in_its_order(cupy):
    for _ in range(20):
        stream = torch.cuda.Stream()
        values = torch.zeros(1_000_003, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
            values.fill_(2.0)
            total = torch.empty_like(values)
            cupy.add([values, values, values], total)
            found = total.clone()
        stream.synchronize()
        assert (found == 6).all()


def test_kernels_allocate_no_memory_outside_torch(cupy):
    import cupy as library

    (tensor,) = placed(far_apart([torch.float32], 1_000_003), 0, "cuda")
    cupy.add([tensor, tensor, tensor], torch.empty_like(tensor))
    assert library.get_default_memory_pool().total_bytes() == 0
