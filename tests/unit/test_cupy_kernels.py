"""The results of the CUDA kernels, run on the host: except for its PTX, their source is C++.

Threads of the host act as those of a block, blocks run one after the other, and host memory acts as
device memory. Only the CUDA compiler, the launch and the device are left to tests/gpu.
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
from kernel_cases import FLOATS, bits, far_apart, summed

from mntrain import kernels as device_kernels
from mntrain.kernels import DeviceKernels

COMPILER = shutil.which("g++")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no g++ here"),
    pytest.mark.xdist_group("kernels"),  # compiled once
]

SIZES = [0, 1, 7, 2048, 2049, 4_099]

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
def kernels(tmp_path_factory):
    """Return DeviceKernels whose device is the host."""
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
    stream = SimpleNamespace(__cuda_stream__=lambda: (0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_kernels.importlib, "import_module", {"cupy": cupy}.__getitem__)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        patch.setattr(device_kernels, "BLOCKS_PER_MULTIPROCESSOR", 2)  # several runs per thread
        patch.setattr(device_kernels, "add", None)  # the kernel supports all sums here
        made = DeviceKernels(torch.device("cuda", 0))
        assert made.name == "cupy", made.why
        yield made


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_addends_are_added_in_their_order_and_rounded_once(kernels, dtype):
    for numel in SIZES:
        for count in (1, 3, 4):
            addends = far_apart([dtype] * count, numel + 1)
            total = torch.ones(numel + 2, dtype=dtype)
            kernels.add([addend[1:] for addend in addends], total[1:-1])
            assert bits(total[1:-1]) == bits(summed(addends, dtype)[1:])
            assert (total[0], total[-1]) == (1, 1)  # nothing beside it is written


@pytest.mark.parametrize("own", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
def test_the_sum_may_replace_an_addend_and_the_others_may_be_narrower(kernels, own, wire):
    for place in range(3):
        addends = far_apart([own if index == place else wire for index in range(3)], 10_003)
        expected = summed(addends, own)
        kernels.add(addends, addends[place])
        assert bits(addends[place]) == bits(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_widened_exactly_and_narrowed_back(kernels, dtype):
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    wide, back = torch.empty(1 << 16), torch.empty_like(values)
    kernels.add([values], wide)
    assert torch.equal(wide.nan_to_num(7, 8, 9), values.float().nan_to_num(7, 8, 9))
    kernels.add([wide], back)
    assert torch.equal(back.isnan(), values.isnan())
    assert bits(back[~back.isnan()]) == bits(values[~values.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_is_rounded_to_the_nearest_and_ties_to_even(kernels, dtype):
    patterns = torch.arange(-(1 << 31), 1 << 31, 65_521 // 2).to(torch.int32)  # all differ
    values = torch.cat([patterns.view(torch.float32), ties(dtype)])
    out = torch.empty(len(values), dtype=dtype)
    kernels.add([values], out)
    expected = values.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert bits(out[~out.isnan()]) == bits(expected[~out.isnan()])


def ties(dtype):
    """Return the numbers half-way between neighbours of a dtype."""
    numbers = torch.arange(0, (1 << 15) - 1).to(torch.int16).view(dtype).float()
    low, high = numbers[:-1], numbers[1:]
    middle = (low.double() + high.double()) / 2
    return middle[middle.isfinite()].float()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_keep_non_finite_numbers(kernels, dtype):
    values = torch.tensor([math.nan, math.inf, math.inf, -math.inf], dtype=dtype)
    other = torch.tensor([1, 1, -math.inf, 1], dtype=dtype)
    total = torch.empty_like(values)
    kernels.add([values, other, torch.zeros_like(other)], total)
    assert total.isnan().tolist() == [True, False, True, False]
    assert total[[1, 3]].tolist() == [math.inf, -math.inf]
