"""The CUDA kernels, run on the host: except for its PTX, their source is C++.

Threads of the host act as those of a block, blocks run one after the other, and host memory acts as
device memory. Only the CUDA compiler, the launch and the device are left to a GPU.
"""

import contextlib
import ctypes
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from mntrain import device_kernels
from mntrain.device_kernels import DeviceKernels

COMPILER = shutil.which("g++")

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
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)
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


def sums_on_the_host(folder):
    """Return `add` of DeviceKernels whose device is the host. Fails for sums that are torch's."""
    nothing = contextlib.nullcontext()
    cupy = SimpleNamespace(
        RawModule=lambda code, options, backend: HostModule(folder, code),
        cuda=SimpleNamespace(
            Device=lambda index: nothing,
            Stream=SimpleNamespace(from_external=lambda stream: nothing),
        ),
    )
    stream = SimpleNamespace(__cuda_stream__=lambda: (0, 0))
    processors = SimpleNamespace(multi_processor_count=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_kernels.importlib, "import_module", {"cupy": cupy}.__getitem__)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
        patch.setattr(device_kernels, "BLOCKS_PER_MULTIPROCESSOR", 2)  # several runs per thread
        made = DeviceKernels(torch.device("cuda", 0))
    assert made.name == "cupy", made.why

    def by_kernel(addends, total):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", lambda device: stream)
            patch.setattr(device_kernels, "add", None)
            made.add(addends, total)

    return by_kernel
