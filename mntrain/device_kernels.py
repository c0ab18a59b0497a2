"""The kernels of a rank's device: torch's, and a CUDA kernel for sums of several addends.

The CUDA kernel reads each addend once and adds in fp32, where torch needs a pass for every addend
and, for 16-bit sums, an fp32 copy. CuPy compiles and launches it. It works on torch's tensors in
place, on torch's current stream, and needs no CUDA headers. CuPy lets NVRTC flush subnormal fp32
numbers to zero, which torch does not do: therefore arithmetic in fp32 is written in PTX.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero.kernels import add

THREADS = 256  # per block
RUN = 8  # elements of a thread, THREADS apart: their loads are contiguous and in flight together
MAX_ADDENDS = 128  # of one launch
BLOCKS_PER_MULTIPROCESSOR = 16  # at most; each block continues with later elements

# The names of the dtypes in the CUDA source, where a dtype's number is its index here.
TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}
KINDS = {dtype: kind for kind, dtype in enumerate(TYPES)}

# The argument of a kernel, laid out as `struct Sum` in the source.
SUM = np.dtype(
    [
        ("address", np.uint64, MAX_ADDENDS),
        ("kind", np.uint8, MAX_ADDENDS),
        ("total", np.uint64),
        ("count", np.int64),
        ("numel", np.int64),
    ]
)

HEAD = f"""
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

constexpr int THREADS = {THREADS}, RUN = {RUN}, MAX_ADDENDS = {MAX_ADDENDS};

struct Sum {{
    u64 address[MAX_ADDENDS];
    unsigned char kind[MAX_ADDENDS];
    u64 total;
    i64 count, numel;
}};
static_assert(sizeof(Sum) == {SUM.itemsize}, "the layout of Python's argument");
enum {{ {", ".join(f"KIND_{name} = {kind}" for kind, name in enumerate(TYPES.values()))} }};
"""

# The only code that is not C++. Tests replace it to run the kernels on the host.
PRIMITIVES = r"""
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ inline float half_to_float(u16 bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
    return wide;
}
__device__ inline u16 float_to_half(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ inline double float_to_double(float x) {
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(x));
    return wide;
}
__device__ inline float plus(float x, float y) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(x), "f"(y));
    return sum;
}
__device__ inline double plus(double x, double y) { return __dadd_rn(x, y); }
"""

BODY = r"""
// The type in which sums of a type accumulate.
template <class T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float to_float(f16 x) { return half_to_float(x.bits); }
template <class T> __device__ inline void widen(T x, float& to) { to = to_float(x); }
template <class T> __device__ inline void widen(T x, double& to) {
    to = float_to_double(to_float(x));
}
__device__ inline void widen(double x, double& to) { to = x; }

// Round to nearest, ties to even.
__device__ inline void narrow(float x, float& to) { to = x; }
__device__ inline void narrow(double x, double& to) { to = x; }
__device__ inline void narrow(float x, bf16& to) {
    unsigned bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = nan ? 0x7fc0 : (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__device__ inline void narrow(float x, f16& to) { to.bits = float_to_half(x); }

// Load a thread's run of an addend, with zeros beyond its end.
template <class T, class A>
__device__ inline void load_as(u64 address, i64 first, i64 numel, A (&to)[RUN]) {
    const T* from = reinterpret_cast<const T*>(address);
    #pragma unroll
    for (int k = 0; k < RUN; k++) {
        i64 i = first + k * THREADS;
        widen(i < numel ? from[i] : T{}, to[k]);
    }
}
template <class A>
__device__ inline void load(const Sum& given, i64 addend, i64 first, A (&to)[RUN]) {
    int kind = given.kind[addend];
    u64 address = given.address[addend];
    if (kind == KIND_float) load_as<float>(address, first, given.numel, to);
    else if (kind == KIND_bf16) load_as<bf16>(address, first, given.numel, to);
    else if (kind == KIND_f16) load_as<f16>(address, first, given.numel, to);
    else if constexpr (sizeof(A) == 8) load_as<double>(address, first, given.numel, to);
}

// Sum addend by addend. A block takes THREADS * RUN elements at a time.
template <class T> __device__ inline void add_all(const Sum& given) {
    const i64 block = THREADS * RUN;
    T* total = reinterpret_cast<T*>(given.total);
    typename Wide<T>::type sum[RUN], next[RUN];
    i64 first = blockIdx.x * block + threadIdx.x;
    for (; first < given.numel; first += gridDim.x * block) {
        load(given, 0, first, sum);
        for (i64 addend = 1; addend < given.count; addend++) {
            load(given, addend, first, next);
            #pragma unroll
            for (int k = 0; k < RUN; k++) sum[k] = plus(sum[k], next[k]);
        }
        #pragma unroll
        for (int k = 0; k < RUN; k++) {
            i64 i = first + k * THREADS;
            if (i < given.numel) narrow(sum[k], total[i]);
        }
    }
}
"""


def source() -> str:
    """Return the CUDA C++ 17 source of the kernels add_float, add_double, add_bf16, add_f16."""
    kernels = [
        f'extern "C" __global__ void add_{name}(const Sum given) {{ add_all<{name}>(given); }}'
        for name in TYPES.values()
    ]
    return "\n".join([HEAD, PRIMITIVES, BODY, *kernels, ""])


class DeviceKernels:
    """Torch's operations on one device, with the CUDA kernel for sums if CuPy can compile it.

    Construction is local; on CUDA it compiles, and CuPy caches the result on disk. `why` names the
    kernels in use, with the reason where they are torch's.
    """

    def __init__(self, device: torch.device) -> None:
        self.name, self.why = "torch", f"torch's kernels: the device is {device.type}"
        self._functions: dict[str, Any] = {}
        if device.type != "cuda":
            return
        self._device = device
        try:
            self._compile()
        except Exception as error:  # CuPy, its compiler and the driver raise various types
            first_line = next(iter(str(error).splitlines()), "")
            self.why = f"torch's kernels: CuPy does not work: {type(error).__name__}: {first_line}"
        else:
            self.name, self.why = "cupy", "CuPy's kernel for sums, torch's for all else"

    def add(self, addends: Sequence[Tensor], total: Tensor) -> None:
        """Leave the sum of addends in `total`, by one launch where the kernel supports the sum."""
        supported = can_add([addend.dtype for addend in addends], total.dtype)
        if not self._functions or not supported:
            add(addends, total)
            return
        if not total.numel():
            return
        given = np.zeros((), SUM)
        given["address"][: len(addends)] = [addend.data_ptr() for addend in addends]
        given["kind"][: len(addends)] = [KINDS[addend.dtype] for addend in addends]
        given["total"], given["count"] = total.data_ptr(), len(addends)
        given["numel"] = total.numel()
        blocks = min(-(-total.numel() // (THREADS * RUN)), self._max_blocks)
        with self._cupy.cuda.Device(self._device.index), self._current_stream():
            self._functions[TYPES[total.dtype]]((blocks,), (THREADS,), (given,))

    def _compile(self) -> None:
        """Compile the kernels. Raises ImportError where there is no CuPy."""
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise ImportError(f"{error}; pip install cupy-cuda12x, or cupy-cuda13x") from error
        if self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self._device)
        self._max_blocks = BLOCKS_PER_MULTIPROCESSOR * properties.multi_processor_count
        module = self._cupy.RawModule(code=source(), options=("-std=c++17",), backend="nvrtc")
        with self._cupy.cuda.Device(self._device.index):
            module.compile()
            self._functions = {t: module.get_function(f"add_{t}") for t in TYPES.values()}

    def _current_stream(self) -> Any:
        """Return torch's current stream as a stream of CuPy."""
        stream, cuda = torch.cuda.current_stream(self._device), self._cupy.cuda
        if hasattr(stream, "__cuda_stream__") and hasattr(cuda.Stream, "from_external"):
            return cuda.Stream.from_external(stream)
        return cuda.ExternalStream(stream.cuda_stream, self._device.index)


def can_add(addends: Sequence[torch.dtype], total: torch.dtype) -> bool:
    """Return True for at most 128 addends of floating dtypes no wider than the accumulator.

    But for two: they are one launch of torch's too, which was 3 to 5 times faster
    (docs/results/gpu.md).
    """
    return (
        len(addends) <= MAX_ADDENDS
        and len(addends) != 2
        and {*addends, total} <= TYPES.keys()
        and (total == torch.float64 or torch.float64 not in addends)
    )
