"""Kernels on a GPU: sums by CuPy and by torch have the same bits; casts, squares and norms."""

import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import FLOATS, SIZES, bits, far_apart, packed, summed
from torch import nn

from mntrain.kernels import MAX_ADDENDS, DeviceKernels
from zero.collectives import SingleProcessCollectives
from zero.kernels import add, pack, square_sums
from zero.optimizer import ZeroOptimizer

TORCH = SimpleNamespace(add=add)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
needs_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"
)


@pytest.fixture(scope="module", params=["torch", pytest.param("cupy", marks=needs_cupy)])
def kernels(request):
    return TORCH if request.param == "torch" else request.getfixturevalue("cupy")


@pytest.fixture(scope="module")
def cupy():
    made = DeviceKernels(torch.device("cuda", 0))
    assert made.name == "cupy", made.why
    return made


def placed(tensors, offset):
    """Return tensors on the GPU that begin `offset` elements after an aligned address."""
    found = []
    for tensor in tensors:
        memory = torch.zeros(len(tensor) + 16, dtype=tensor.dtype, device="cuda")
        found.append(memory[offset : offset + len(tensor)].copy_(tensor))
    return found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("offset", [0, 1])
def test_addends_are_added_in_their_order_and_rounded_once(kernels, dtype, numel, offset):
    for count in (1, 2, 3, 5):
        addends = far_apart([dtype] * count, numel)
        (total,) = placed([torch.ones(numel, dtype=dtype)], 0)
        kernels.add(placed(addends, offset), total)
        assert bits(total) == bits(summed(addends, dtype))


@pytest.mark.parametrize("own", FLOATS, ids=str)
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", range(3))
def test_the_sum_may_replace_an_addend_and_the_others_may_be_narrower(kernels, own, wire, place):
    narrow = wire if own.itemsize > wire.itemsize else own
    addends = far_apart([own if index == place else narrow for index in range(3)], 10_007)
    there = placed(addends, 0)
    kernels.add(there, there[place])
    assert bits(there[place]) == bits(summed(addends, own))


@needs_cupy
@pytest.mark.parametrize("count", [MAX_ADDENDS, MAX_ADDENDS + 1])
def test_any_number_of_addends_is_added(cupy, count):
    addends = far_apart([torch.bfloat16] * count, 1000)
    total = torch.empty(1000, dtype=torch.bfloat16, device="cuda")
    cupy.add(placed(addends, 0), total)
    assert bits(total) == bits(summed(addends, torch.bfloat16))


@needs_cupy
def test_integers_are_added(cupy):
    total = torch.tensor([100, 100], dtype=torch.uint8, device="cuda")
    cupy.add([total, total.clone(), total.clone()], total)
    assert total.tolist() == [300 - 256] * 2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_keep_non_finite_numbers(kernels, dtype):
    values = torch.tensor([math.nan, math.inf, math.inf, -math.inf], dtype=dtype, device="cuda")
    other = torch.tensor([1, 1, -math.inf, 1], dtype=dtype, device="cuda")
    total = torch.empty_like(values)
    kernels.add([values, other], total)
    assert total.isnan().tolist() == [True, False, True, False]
    assert total[[1, 3]].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_casts_keep_non_finite_numbers_unless_the_scale_is_zero(dtype, target):
    values = torch.tensor([math.nan, math.inf, math.inf, -math.inf], dtype=dtype, device="cuda")
    out = torch.empty(4, dtype=target, device="cuda")
    pack(values, 0.5, out)
    assert out.isnan().tolist() == [True, False, False, False]
    assert out[1:].tolist() == [math.inf, math.inf, -math.inf]
    pack(values, 0.0, out)
    assert out.tolist() == [0.0] * 4


def test_subnormal_numbers_are_kept(kernels):
    small = torch.tensor([1e-40, 3e-42], device="cuda")
    total = torch.empty_like(small)
    kernels.add([small, small, small], total)
    assert (total > 2e-42).all()
    assert bits(total) == bits(summed([small.cpu()] * 3, torch.float32))
    pack(small, 0.5, total)
    assert bits(total) == bits(packed(small.cpu(), 0.5, torch.float32))
    assert (square_sums([small]) > 0).all()


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_casts_and_products_are_rounded_once(dtype, target, offset):
    for numel in SIZES:
        (values,) = far_apart([dtype], numel)
        for scale in (1.0, 0.1, 3e-5):
            (out,) = placed([torch.ones(numel, dtype=target)], offset)
            pack(*placed([values], offset), scale, out)
            assert bits(out) == bits(packed(values, scale, target))


def test_every_16_bit_number_is_widened_exactly_and_narrowed_back(kernels):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).cuda()
    for dtype in (torch.bfloat16, torch.float16):
        values = every.view(dtype)[~every.view(dtype).isnan()]
        wide = torch.empty(len(values), device="cuda")
        kernels.add([values], wide)
        assert bits(wide) == bits(values.float())
        back = torch.empty_like(values)
        kernels.add([wide], back)
        assert bits(back) == bits(values)


def test_squares_of_many_tensors_are_those_of_fp64():
    lengths = [0, 1, 7, 65_535, 65_536, 65_537, 1_000_003, *range(1, 200)]
    tensors = []
    for index, numel in enumerate(lengths):
        dtype = FLOATS[index % len(FLOATS)]
        tensors += placed(far_apart([dtype], numel), index % 3)
    expected = torch.stack([tensor.double().square().sum() for tensor in tensors])
    torch.testing.assert_close(square_sums(tensors), expected, rtol=1e-12, atol=0)
    assert (square_sums(tensors[:1]) == 0).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_squares_have_the_same_bits_at_every_address_and_beside_any_tensors(dtype):
    values = far_apart([dtype], 1_000_003)
    expected = float(square_sums(placed(values, 0)))
    for offset in range(9):
        (moved,) = placed(values, offset)
        others = placed(far_apart([dtype] * offset, 5000 + offset), 0)
        assert float(square_sums([*others, moved])[-1]) == expected


def test_squares_keep_non_finite_numbers_and_neither_overflow_nor_vanish():
    tensors = [torch.tensor([x, 1.0], device="cuda") for x in (math.nan, math.inf, 3e38)]
    nan, inf, large = square_sums(tensors).tolist()
    assert math.isnan(nan)
    assert inf == math.inf
    assert large == pytest.approx(9e76)


@needs_cupy
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


@needs_cupy
def test_kernels_allocate_no_memory_outside_torch(cupy):
    import cupy as library

    (tensor,) = placed(far_apart([torch.float32], 1_000_003), 0)
    cupy.add([tensor, tensor], torch.empty_like(tensor))
    assert library.get_default_memory_pool().total_bytes() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_stage_has_the_norm_of_a_step(dtype):
    zero, one, two = (norm_of_a_step(stage, dtype) for stage in (0, 1, 2))
    assert one == two
    # At stage 0 parameters have other addresses, for which a GPU may select another kernel.
    assert one == pytest.approx(zero, rel=1e-2 if dtype.itemsize < 4 else 1e-5)


def norm_of_a_step(stage, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(501, 301), nn.GELU(), nn.Linear(301, 7)).to("cuda", dtype)
    batch = torch.randn(5, 501).to("cuda", dtype)
    optimizer = ZeroOptimizer(
        model.named_parameters(),
        torch.optim.SGD,
        SingleProcessCollectives(),
        stage=stage,
        lr=0.1,
    )
    model(batch).square().mean().backward()
    return optimizer.step().grad_norm
