"""The kernels of a rank's device: torch's, and a CUDA kernel for sums of several addends.

The CUDA kernel reads each addend once and adds in fp32, where torch needs a pass for every addend
and, for 16-bit sums, an fp32 copy. CuPy compiles and launches it. It works on torch's tensors in
place, on torch's current stream, and needs no CUDA headers. CuPy lets NVRTC flush subnormal fp32
numbers to zero, which torch does not do: therefore arithmetic in fp32 is written in PTX.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero.kernels import Kernels

THREADS = 256  # per block
RUN = 8  # elements that a thread processes at a time: 16 bytes of 16-bit floats
MAX_ADDENDS = 128  # of one launch
BLOCKS_PER_MULTIPROCESSOR = 16  # at most; each thread continues with the next run

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
        ("vectorized", np.int64),
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
    i64 count, numel, vectorized;
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
__device__ inline float double_to_float(double x) {
    float narrow;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrow) : "d"(x));
    return narrow;
}
__device__ inline float plus(float x, float y) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(x), "f"(y));
    return sum;
}
__device__ inline double plus(double x, double y) { return __dadd_rn(x, y); }
// Store 16 bytes with one instruction; the compiler would split the store.
__device__ inline void store_word(uint4* to, uint4 word) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(to)),
                    "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w) : "memory");
}
"""

BODY = r"""
// The type in which sums of a type accumulate.
template <class T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float to_float(f16 x) { return half_to_float(x.bits); }
__device__ inline float to_float(double x) { return double_to_float(x); }
template <class T> __device__ inline void widen(T x, float& to) { to = to_float(x); }
template <class T> __device__ inline void widen(T x, double& to) {
    to = float_to_double(to_float(x));
}
__device__ inline void widen(double x, double& to) { to = x; }

// Round to nearest, ties to even.
template <class A> __device__ inline void narrow(A x, float& to) { to = to_float(x); }
__device__ inline void narrow(double x, double& to) { to = x; }
template <class A> __device__ inline void narrow(A x, bf16& to) {
    unsigned bits = __float_as_uint(to_float(x));
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = nan ? 0x7fc0 : (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
template <class A> __device__ inline void narrow(A x, f16& to) {
    to.bits = float_to_half(to_float(x));
}

// Load or store N elements: RUN of them in words of 16 bytes, fewer one by one.
template <int N, class T, class A>
__device__ inline void load_as(u64 address, i64 first, A (&to)[N]) {
    const T* from = reinterpret_cast<const T*>(address) + first;
    T run[N];
    if constexpr (N == RUN) {
        uint4 words[sizeof(run) / sizeof(uint4)];
        for (int i = 0; i < (int)(sizeof(run) / sizeof(uint4)); i++)
            words[i] = reinterpret_cast<const uint4*>(from)[i];
        memcpy(run, words, sizeof(run));
    } else {
        for (int i = 0; i < N; i++) run[i] = from[i];
    }
    for (int i = 0; i < N; i++) widen(run[i], to[i]);
}
template <int N, class A>
__device__ inline void load(int kind, u64 address, i64 first, A (&to)[N]) {
    if (kind == KIND_float) load_as<N, float>(address, first, to);
    else if (kind == KIND_bf16) load_as<N, bf16>(address, first, to);
    else if (kind == KIND_f16) load_as<N, f16>(address, first, to);
    else load_as<N, double>(address, first, to);
}
template <int N, class T> __device__ inline void store(const T (&from)[N], T* to) {
    if constexpr (N == RUN) {
        uint4 words[sizeof(from) / sizeof(uint4)];
        memcpy(words, from, sizeof(from));
        for (int i = 0; i < (int)(sizeof(from) / sizeof(uint4)); i++)
            store_word(reinterpret_cast<uint4*>(to) + i, words[i]);
    } else {
        for (int i = 0; i < N; i++) to[i] = from[i];
    }
}

// Sum N elements, addend by addend.
template <class T, int N> __device__ inline void add_run(const Sum& given, i64 first) {
    typename Wide<T>::type sum[N], next[N];
    load<N>(given.kind[0], given.address[0], first, sum);
    for (i64 k = 1; k < given.count; k++) {
        load<N>(given.kind[k], given.address[k], first, next);
        for (int i = 0; i < N; i++) sum[i] = plus(sum[i], next[i]);
    }
    T out[N];
    for (int i = 0; i < N; i++) narrow(sum[i], out[i]);
    store<N>(out, reinterpret_cast<T*>(given.total) + first);
}

// Each thread takes runs of the vectorized elements, then single ones of the others.
template <class T> __device__ inline void add_all(const Sum& given) {
    i64 thread = (i64)blockIdx.x * THREADS + threadIdx.x, threads = (i64)gridDim.x * THREADS;
    for (i64 i = thread * RUN; i < given.vectorized; i += threads * RUN) add_run<T, RUN>(given, i);
    for (i64 i = given.vectorized + thread; i < given.numel; i += threads) add_run<T, 1>(given, i);
}
"""


def source() -> str:
    """Return the CUDA C++ 17 source of the kernels add_float, add_double, add_bf16, add_f16."""
    kernels = [
        f'extern "C" __global__ void add_{name}(const Sum given) {{ add_all<{name}>(given); }}'
        for name in TYPES.values()
    ]
    return "\n".join([HEAD, PRIMITIVES, BODY, *kernels, ""])


class DeviceKernels(Kernels):
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
            super().add(addends, total)
            return
        if not total.numel():
            return
        given = np.zeros((), SUM)
        given["address"][: len(addends)] = [addend.data_ptr() for addend in addends]
        given["kind"][: len(addends)] = [KINDS[addend.dtype] for addend in addends]
        given["total"], given["count"] = total.data_ptr(), len(addends)
        given["numel"], given["vectorized"] = total.numel(), vectorized([*addends, total])
        blocks = min(-(-total.numel() // (THREADS * RUN)), self._max_blocks)
        with self._cupy.cuda.Device(self._device.index), self._current_stream():
            self._functions[TYPES[total.dtype]]((blocks,), (THREADS,), (given,))

    def _compile(self) -> None:
        """Compile the kernels. Raises ImportError where there is no CuPy."""
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise ImportError(
                f"{error}; pip install 'mntrain[cuda12]', or 'mntrain[cuda13]'"
            ) from error
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
        cuda = self._cupy.cuda
        stream = TorchStream(torch.cuda.current_stream(self._device).cuda_stream)
        if hasattr(cuda.Stream, "from_external"):  # CuPy 14 and later
            return cuda.Stream.from_external(stream)
        return cuda.ExternalStream(stream.address, self._device.index)


@dataclass(frozen=True)
class TorchStream:
    """A stream of torch in CUDA's protocol for streams in Python."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the stream."""
        return 0, self.address


def can_add(addends: Sequence[torch.dtype], total: torch.dtype) -> bool:
    """Return True for at most 128 addends of floating dtypes no wider than the accumulator."""
    return (
        len(addends) <= MAX_ADDENDS
        and {*addends, total} <= TYPES.keys()
        and (total == torch.float64 or torch.float64 not in addends)
    )


def vectorized(tensors: Sequence[Tensor]) -> int:
    """Return how many elements can be moved in runs of 16-byte words; 0 if one is not aligned."""
    if any(tensor.data_ptr() % 16 for tensor in tensors):
        return 0
    return tensors[0].numel() // RUN * RUN
