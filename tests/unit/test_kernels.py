"""Sums by torch and by the CUDA kernel; casts and squares by torch; which kernels a device gets."""

import contextlib
import ctypes
import functools
import math
import re
import shutil
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import FLOATS, SIZES, bits, far_apart, packed, summed

from mntrain import kernels as device_kernels
from mntrain.kernels import MAX_ADDENDS, DeviceKernels, can_add
from zero import norms
from zero.collectives import SingleProcessCollectives
from zero.kernels import add, pack, square_sums

INTEGERS = [torch.uint8, torch.int32, torch.int64]
TORCH = SimpleNamespace(add=add)
COMPILER = shutil.which("g++")
CUDA_SIZES = [0, 1, 7, 2048, 2049, 4_099]

# Replaces the PTX. Halves are converted by hand, since compilers name the type differently.
HOST = r"""
#include <cmath>
#include <cstring>
#include <pthread.h>
#include <thread>
#include <vector>
#define __device__
#define __global__
struct Three { unsigned x, y, z; };
static thread_local Three threadIdx;
static Three blockIdx, gridDim;
static pthread_barrier_t barrier;
template <class To, class From> To cast(From x) { To y; std::memcpy(&y, &x, sizeof(y)); return y; }
static float __uint_as_float(unsigned x) { return cast<float>(x); }
static unsigned __float_as_uint(float x) { return cast<unsigned>(x); }
struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };
static float half_to_float(unsigned short bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 31 ? (fraction ? NAN : INFINITY)
               : exponent ? std::ldexp(1024.f + fraction, exponent - 25)
                          : std::ldexp((float)fraction, -24);
    return bits >> 15 ? -size : size;
}
static unsigned short float_to_half(float x) {
    unsigned short sign = std::signbit(x) ? 0x8000 : 0;
    float size = std::fabs(x);
    if (std::isnan(x)) return 0x7fff;
    if (size >= 65520.f) return sign | 0x7c00;
    int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
    int units = (int)std::nearbyint(std::ldexp(size, 10 - exponent));
    return sign | (unsigned short)(units + (exponent + 14) * 1024);
}
static double float_to_double(float x) { return x; }
static float plus(float x, float y) { return x + y; }
static double plus(double x, double y) { return x + y; }

template <class Given> void launch(void (*kernel)(const Given), const Given* given, unsigned grid) {
    gridDim = {grid, 1, 1};
    pthread_barrier_init(&barrier, nullptr, THREADS);
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < THREADS; thread++)
        threads.emplace_back([=] {
            threadIdx = {thread, 0, 0};
            for (unsigned block = 0; block < grid; block++) {
                if (thread == 0) blockIdx = {block, 0, 0};
                pthread_barrier_wait(&barrier);
                kernel(*given);
                pthread_barrier_wait(&barrier);
            }
        });
    for (auto& thread : threads) thread.join();
    pthread_barrier_destroy(&barrier);
}
"""


def for_the_host(text):
    """Return the source as C++ for the host, with a function `run_NAME` for each kernel."""
    text = text.replace(device_kernels.PRIMITIVES, HOST)
    kernels = re.findall(r"__global__ void (\w+)\(const (\w+) given\)", text)
    runs = [
        f'extern "C" void run_{name}(const {given}* given, unsigned grid) '
        f"{{ launch<{given}>({name}, given, grid); }}"
        for name, given in kernels
    ]
    return "\n".join([text, *runs])


class HostModule:
    """A `cupy.RawModule` that compiles for the host."""

    def __init__(self, folder, code):
        (folder / "kernels.cpp").write_text(for_the_host(code))
        self._library = folder / "kernels.so"
        options = ["-std=c++17", "-O1", "-ffp-contract=off", "-pthread", "-shared", "-fPIC"]
        command = [COMPILER, *options, "-o", self._library, folder / "kernels.cpp"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        self._library = ctypes.CDLL(str(self._library))

    def compile(self):
        pass

    def get_function(self, name):
        run = getattr(self._library, f"run_{name}")

        def launch(grid, block, arguments):
            assert block == (device_kernels.THREADS,)
            (given,) = arguments
            assert given.shape == ()
            run(ctypes.c_void_p(given.ctypes.data), ctypes.c_uint(*grid))

        return launch


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    return functools.cache(lambda code: HostModule(folder, code))


@pytest.fixture
def cuda_on_host(compiled, monkeypatch):
    """Return DeviceKernels whose device is the host: but for its PTX, their source is C++.

    Threads of the host act as those of a block, blocks run one after the other, and host memory
    acts as device memory. Only the compiler, the launch and the device are left to tests/gpu.
    """
    nothing = contextlib.nullcontext()
    cupy = SimpleNamespace(
        RawModule=lambda code, options, backend: compiled(code),
        cuda=SimpleNamespace(
            Device=lambda index: nothing,
            Stream=SimpleNamespace(from_external=lambda stream: nothing),
        ),
    )
    processors = SimpleNamespace(multi_processor_count=1)
    stream = SimpleNamespace(__cuda_stream__=lambda: (0, 0))
    monkeypatch.setattr(device_kernels.importlib, "import_module", {"cupy": cupy}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(device_kernels, "BLOCKS_PER_MULTIPROCESSOR", 2)  # several runs per thread
    monkeypatch.setattr(device_kernels, "add", None)  # the kernel supports all sums here
    made = DeviceKernels(torch.device("cuda", 0))
    assert made.name == "cupy", made.why
    return made


@pytest.fixture(
    params=[
        "torch",
        pytest.param(
            "cuda_on_host",
            marks=[
                pytest.mark.skipif(COMPILER is None, reason="no g++ here"),
                pytest.mark.xdist_group("kernels"),  # compiled once
            ],
        ),
    ]
)
def kernels(request):
    return TORCH if request.param == "torch" else request.getfixturevalue(request.param)


# Sums.

COUNTS = [1, 2, 3, 5]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_addends_are_added_in_their_order_and_rounded_once(kernels, dtype):
    counts = [n for n in COUNTS if kernels is TORCH or can_add([dtype] * n, dtype)]
    for count, numel in product(counts, SIZES if kernels is TORCH else CUDA_SIZES):
        addends = far_apart([dtype] * count, numel + 1)
        total = torch.full((numel + 2,), 77, dtype=dtype)
        kernels.add([addend[1:] for addend in addends], total[1:-1])
        assert bits(total[1:-1]) == bits(summed(addends, dtype)[1:])
        assert (total[0], total[-1]) == (77, 77)  # nothing beside it is written


@pytest.mark.parametrize(
    ("dtype", "wire"),
    [
        *((dtype, dtype) for dtype in [*FLOATS, torch.int32]),
        *((own, wire) for own in FLOATS[:2] for wire in FLOATS[2:]),
    ],
    ids=str,
)
def test_the_sum_may_replace_any_addend_and_others_of_a_wire_dtype_are_widened(
    kernels, dtype, wire
):
    for count in (n for n in COUNTS if kernels is TORCH or can_add([wire] * n, dtype)):
        for place in (None, *range(count)):
            dtypes = [dtype if i == place else wire for i in range(count)]
            addends = far_apart(dtypes, 10_003)
            before = [addend.clone() for addend in addends]
            total = torch.empty(10_003, dtype=dtype) if place is None else addends[place]
            kernels.add(addends, total)
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
def test_sums_keep_non_finite_numbers(kernels, dtype):
    odd = torch.tensor([math.nan, math.inf, math.inf, -math.inf], dtype=dtype)
    other = torch.tensor([1, 1, -math.inf, 1], dtype=dtype)
    for addends in ([odd, other], [odd, other, torch.ones_like(odd)])[kernels is not TORCH :]:
        total = torch.empty_like(odd)
        kernels.add(addends, total)
        assert total.isnan().tolist() == [True, False, True, False]
        assert total[[1, 3]].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_widened_exactly_and_narrowed_back(cuda_on_host, dtype):
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    wide, back = torch.empty(1 << 16), torch.empty_like(values)
    cuda_on_host.add([values], wide)
    assert torch.equal(wide.nan_to_num(7, 8, 9), values.float().nan_to_num(7, 8, 9))
    cuda_on_host.add([wide], back)
    assert torch.equal(back.isnan(), values.isnan())
    assert bits(back[~back.isnan()]) == bits(values[~values.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_is_rounded_to_the_nearest_and_ties_to_even(cuda_on_host, dtype):
    patterns = torch.arange(-(1 << 31), 1 << 31, 65_521 // 2).to(torch.int32)  # all differ
    values = torch.cat([patterns.view(torch.float32), ties(dtype)])
    out = torch.empty(len(values), dtype=dtype)
    cuda_on_host.add([values], out)
    expected = values.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert bits(out[~out.isnan()]) == bits(expected[~out.isnan()])


def ties(dtype):
    """Return the numbers half-way between neighbours of a dtype."""
    numbers = torch.arange(0, (1 << 15) - 1).to(torch.int16).view(dtype).float()
    low, high = numbers[:-1], numbers[1:]
    middle = (low.double() + high.double()) / 2
    return middle[middle.isfinite()].float()


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
