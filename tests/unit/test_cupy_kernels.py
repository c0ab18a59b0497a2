"""What CuPy's kernels compute, by the host: their CUDA source, its PTX apart, is C++ as well.

Threads of the host stand for those of a block, blocks run one after the other, and host memory is
the device's. That leaves the compiler, the launch and the device itself to tests/gpu.
"""

import contextlib
import ctypes
import math
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import FLOATS, bits, far_apart, packed, summed

from mntrain import cupy_kernels
from mntrain.cupy_kernels import CHUNK, CupyKernels
from zero.kernels import TorchKernels

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ here")

SIZES = [0, 1, 7, 8, 1000, 10_003]

# In place of the PTX. Halves are taken apart here since compilers differ in what they call them.
HOST = r"""
#include <cmath>
#include <cstring>
#include <pthread.h>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __shared__ static
struct Three { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static thread_local Three threadIdx;
static Three blockIdx, gridDim;
static pthread_barrier_t barrier;
static void __syncthreads() { pthread_barrier_wait(&barrier); }
template <class To, class From> To cast(From x) { To y; std::memcpy(&y, &x, sizeof(y)); return y; }
static float __uint_as_float(unsigned x) { return cast<float>(x); }
static unsigned __float_as_uint(float x) { return cast<unsigned>(x); }
static double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }
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
static float double_to_float(double x) { return (float)x; }
static void store_word(uint4* to, uint4 word) { *to = word; }
static float plus(float x, float y) { return x + y; }
static float times(float x, float y) { return x * y; }
static double plus(double x, double y) { return x + y; }
static double times(double x, double y) { return x * y; }

template <class Given> void launch(void (*kernel)(const Given), const Given* given, unsigned grid) {
    gridDim = {grid, 1, 1};
    pthread_barrier_init(&barrier, nullptr, THREADS);
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < THREADS; thread++)
        threads.emplace_back([=] {
            threadIdx = {thread, 0, 0};
            for (unsigned block = 0; block < grid; block++) {
                if (thread == 0) blockIdx = {block, 0, 0};
                __syncthreads();
                kernel(*given);
                __syncthreads();
            }
        });
    for (auto& thread : threads) thread.join();
    pthread_barrier_destroy(&barrier);
}
"""


def for_the_host(text):
    """The source as C++ for the host, with a function `run_NAME` for every kernel."""
    text = text.replace(cupy_kernels.PRIMITIVES, HOST)
    kernels = re.findall(r"__global__ void (\w+)\(const (\w+) given\)", text)
    runs = [
        f'extern "C" void run_{name}(const {given}* given, unsigned grid) '
        f"{{ launch<{given}>({name}, given, grid); }}"
        for name, given in kernels
    ]
    return "\n".join([text, *runs])


class HostModule:
    """What `cupy.RawModule` is for the kernels, on the host."""

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
            assert block == (cupy_kernels.THREADS,)
            (given,) = arguments
            assert given.shape == ()
            run(ctypes.c_void_p(given.ctypes.data), ctypes.c_uint(*grid))

        return launch


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """CupyKernels whose device is the host."""
    folder = tmp_path_factory.mktemp("kernels")
    nothing = contextlib.nullcontext()
    cupy = SimpleNamespace(
        RawModule=lambda code, options, backend: HostModule(folder, code),
        cuda=SimpleNamespace(
            Device=lambda index: nothing,
            Stream=SimpleNamespace(from_external=lambda stream: nothing),
        ),
    )
    processors = SimpleNamespace(multi_processor_count=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy_kernels.importlib, "import_module", {"cupy": cupy}.__getitem__)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
        patch.setattr(cupy_kernels, "BLOCKS", 2)  # so that threads go on with further runs
        made = CupyKernels(torch.device("cuda", 0))
        made._device = torch.device("cpu")
        made._torch = None  # nothing may be left to torch
        yield made


def moved(tensors, offset):
    """Copies that lie so many elements behind an address that suits any access."""
    found = []
    for tensor in tensors:
        room = torch.empty(len(tensor) + 32, dtype=tensor.dtype)
        start = -(room.data_ptr() // tensor.itemsize) % (16 // tensor.itemsize) + offset
        found.append(room[start : start + len(tensor)].copy_(tensor))
    return found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_sums_have_the_bits_of_their_order(kernels, dtype, offset):
    for numel in SIZES:
        for count in (1, 2, 3):
            addends = far_apart([dtype] * count, numel)
            (total,) = moved([torch.ones(numel, dtype=dtype)], 0)
            kernels.add(moved(addends, offset), total)
            assert bits(total) == bits(summed(addends, dtype))


@pytest.mark.parametrize("own", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
def test_the_sum_may_lie_where_an_addend_does_and_the_others_be_narrower(kernels, own, wire):
    for place in range(3):
        addends = far_apart([own if index == place else wire for index in range(3)], 10_003)
        there = moved(addends, 0)
        kernels.add(there, there[place])
        assert bits(there[place]) == bits(summed(addends, own))


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_casts_and_products_have_the_bits_of_one_rounding(kernels, dtype, target):
    for numel in SIZES:
        for offset, scale in ((0, 1.0), (0, 0.1), (1, 3e-5)):
            (values,) = far_apart([dtype], numel)
            (out,) = moved([torch.ones(numel, dtype=target)], offset)
            kernels.pack(*moved([values], offset), scale, out)
            assert bits(out) == bits(packed(values, scale, target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_becomes_fp32_and_comes_back(kernels, dtype):
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    wide, back = torch.empty(1 << 16), torch.empty_like(values)
    kernels.pack(values, 1.0, wide)
    assert torch.equal(wide.nan_to_num(7, 8, 9), values.float().nan_to_num(7, 8, 9))
    kernels.pack(wide, 1.0, back)
    assert torch.equal(back.isnan(), values.isnan())
    assert bits(back[~back.isnan()]) == bits(values[~values.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_is_rounded_to_the_nearest_and_ties_to_even(kernels, dtype):
    patterns = torch.arange(-(1 << 31), 1 << 31, 65_521 // 2).to(torch.int32)  # none the same below
    values = torch.cat([patterns.view(torch.float32), ties(dtype)])
    out = torch.empty(len(values), dtype=dtype)
    kernels.pack(values, 1.0, out)
    expected = values.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert bits(out[~out.isnan()]) == bits(expected[~out.isnan()])


def ties(dtype):
    """Numbers half-way between neighbours of a dtype."""
    numbers = torch.arange(0, (1 << 15) - 1).to(torch.int16).view(dtype).float()
    low, high = numbers[:-1], numbers[1:]
    middle = (low.double() + high.double()) / 2
    return middle[middle.isfinite()].float()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite_stays_so(kernels, dtype):
    odd = torch.tensor([math.nan, math.inf, math.inf, -math.inf], dtype=dtype)
    other = torch.tensor([1, 1, -math.inf, 1], dtype=dtype)
    total = torch.empty_like(odd)
    kernels.add([odd, other], total)
    assert total.isnan().tolist() == [True, False, True, False]
    assert total[[1, 3]].tolist() == [math.inf, -math.inf]
    assert torch.equal(kernels.square_sums([odd, odd[1:]]).isnan(), torch.tensor([True, False]))


def test_squares_of_many_tensors_are_those_of_fp64(kernels):
    lengths = [0, 1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3, 0, *range(1, 20)]
    tensors = []
    for index, numel in enumerate(lengths):
        tensors += moved(far_apart([FLOATS[index % len(FLOATS)]], numel), index % 3)
    expected = TorchKernels().square_sums(tensors)
    torch.testing.assert_close(kernels.square_sums(tensors), expected, rtol=1e-12, atol=0)
    assert kernels.square_sums(tensors[:1]).tolist() == [0]
    assert kernels.square_sums([]).tolist() == []


def test_squares_have_equal_bits_wherever_elements_lie_and_whatever_is_beside_them(kernels):
    for dtype in FLOATS:
        values = far_apart([dtype], CHUNK + 1003)
        expected = float(kernels.square_sums(moved(values, 0)))
        for offset in (1, 3, 8):
            beside = moved(far_apart([dtype] * 2, 100 + offset), 0)
            assert float(kernels.square_sums([*beside, *moved(values, offset)])[-1]) == expected


def test_what_lies_in_the_place_of_others_is_told_anew(kernels):
    room = torch.ones(1000)
    assert kernels.square_sums([room]).tolist() == [1000]
    assert kernels.square_sums([room.fill_(2)]).tolist() == [4000]
    assert kernels.square_sums([room[:500], room[500:]]).tolist() == [2000, 2000]
    assert kernels.square_sums([room.view(torch.float64), room]).tolist()[1] == 4000
