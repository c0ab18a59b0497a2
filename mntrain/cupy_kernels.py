"""The kernels of `zero.kernels` in CUDA, compiled by CuPy: each reads and writes memory once.

Torch's tensors are used where they lie, on torch's current stream, and what memory is needed
besides is torch's. No CUDA headers are needed. CuPy lets NVRTC flush fp32 numbers below the normal
ones to zero, which torch does not: so arithmetic in fp32 is written in PTX, which does not either.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zero.kernels import TorchKernels

THREADS = 256
RUN = 8  # elements that a thread takes at a time: 16 bytes of 16-bit floats
CHUNK = 1 << 15  # elements of which a block sums the squares
MOST = 128  # addends that one launch takes
BLOCKS = 16  # of every multiprocessor, at most: each goes on with the next run

# The dtypes by what the source calls them. A number of its own goes with each: its place.
TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}
KINDS = {dtype: kind for kind, dtype in enumerate(TYPES)}

# What kernels are given, laid out as in the source.
ADD = np.dtype(
    [
        ("at", np.uint64, MOST),
        ("kind", np.uint8, MOST),
        ("total", np.uint64),
        ("count", np.int64),
        ("numel", np.int64),
        ("whole", np.int64),
    ]
)
PACK = np.dtype(
    [
        ("source", np.uint64),
        ("target", np.uint64),
        ("numel", np.int64),
        ("whole", np.int64),
        ("scale", np.float64),
    ]
)
SQUARES = np.dtype(
    [
        ("table", np.uint64),
        ("owner", np.uint64),
        ("parts", np.uint64),
        ("sums", np.uint64),
    ]
)

HEAD = f"""
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

constexpr int THREADS = {THREADS}, RUN = {RUN}, MOST = {MOST};
constexpr i64 CHUNK = {CHUNK};

struct Add {{
    u64 at[MOST];
    unsigned char kind[MOST];
    u64 total;
    i64 count, numel, whole;
}};
struct Pack {{
    u64 source, target;
    i64 numel, whole;
    double scale;
}};
struct Squares {{
    u64 table, owner, parts, sums;
}};
static_assert(sizeof(Add) == {ADD.itemsize}, "as Python lays it out");
static_assert(sizeof(Pack) == {PACK.itemsize}, "as Python lays it out");
static_assert(sizeof(Squares) == {SQUARES.itemsize}, "as Python lays it out");
"""

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
__device__ inline float times(float x, float y) {
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
    return product;
}
// A store of 16 bytes, which the compiler would cut up.
__device__ inline void store_word(uint4* to, uint4 word) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(to)),
                    "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w) : "memory");
}
__device__ inline double plus(double x, double y) { return __dadd_rn(x, y); }
__device__ inline double times(double x, double y) { return __dmul_rn(x, y); }
"""

BODY = r"""
// What sums and products of a type are made in.
template <class T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };

// Widening, to float or double.
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float to_float(f16 x) { return half_to_float(x.bits); }
__device__ inline float to_float(double x) { return double_to_float(x); }
template <class T> __device__ inline double to_double(T x) { return float_to_double(to_float(x)); }
__device__ inline double to_double(double x) { return x; }
template <class T> __device__ inline void widen(T x, float& to) { to = to_float(x); }
template <class T> __device__ inline void widen(T x, double& to) { to = to_double(x); }

// Rounding, to the nearest, ties to even; as in torch, double becomes 16 bits by way of float.
template <class A> __device__ inline void narrow(A x, float& to) { to = to_float(x); }
template <class A> __device__ inline void narrow(A x, double& to) { to = to_double(x); }
template <class A> __device__ inline void narrow(A x, bf16& to) {
    unsigned bits = __float_as_uint(to_float(x));
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = nan ? 0x7fc0 : (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
template <class A> __device__ inline void narrow(A x, f16& to) {
    to.bits = float_to_half(to_float(x));
}

// A run of N elements from memory and to it: of RUN in words of 16 bytes, else one by one.
template <int N, class T> __device__ inline void load(const T* from, T (&to)[N]) {
    if constexpr (N == RUN) {
        uint4 words[sizeof(to) / sizeof(uint4)];
        for (int i = 0; i < (int)(sizeof(to) / sizeof(uint4)); i++)
            words[i] = reinterpret_cast<const uint4*>(from)[i];
        memcpy(to, words, sizeof(to));
    } else {
        for (int i = 0; i < N; i++) to[i] = from[i];
    }
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
template <int N, class T, class A>
__device__ inline void load_wide(u64 from, i64 first, A (&to)[N]) {
    T run[N];
    load<N>(reinterpret_cast<const T*>(from) + first, run);
    for (int i = 0; i < N; i++) widen(run[i], to[i]);
}
template <int N, class A>
__device__ inline void load_kind(int kind, u64 from, i64 first, A (&to)[N]) {
    if (kind == KIND_float) load_wide<N, float>(from, first, to);
    else if (kind == KIND_bf16) load_wide<N, bf16>(from, first, to);
    else if (kind == KIND_f16) load_wide<N, f16>(from, first, to);
    else load_wide<N, double>(from, first, to);
}

// Every thread takes runs of the first `whole` elements, and then single ones of the others.
template <class Work> __device__ inline void stride(i64 whole, i64 numel, Work work) {
    i64 thread = (i64)blockIdx.x * THREADS + threadIdx.x, threads = (i64)gridDim.x * THREADS;
    for (i64 i = thread * RUN; i < whole; i += threads * RUN) work.template at<RUN>(i);
    for (i64 i = whole + thread; i < numel; i += threads) work.template at<1>(i);
}

template <class T> struct Adding {
    const Add& given;
    template <int N> __device__ inline void at(i64 first) const {
        typename Wide<T>::type sum[N], next[N];
        load_kind<N>(given.kind[0], given.at[0], first, sum);
        for (i64 k = 1; k < given.count; k++) {
            load_kind<N>(given.kind[k], given.at[k], first, next);
            for (int i = 0; i < N; i++) sum[i] = plus(sum[i], next[i]);
        }
        T out[N];
        for (int i = 0; i < N; i++) narrow(sum[i], out[i]);
        store<N>(out, reinterpret_cast<T*>(given.total) + first);
    }
};

template <class S, class T> struct Packing {
    const Pack& given;
    template <int N> __device__ inline void at(i64 first) const {
        typename Wide<S>::type wide[N], scale;
        widen(given.scale, scale);
        load_wide<N, S>(given.source, first, wide);
        T out[N];
        for (int i = 0; i < N; i++) narrow(times(wide[i], scale), out[i]);
        store<N>(out, reinterpret_cast<T*>(given.target) + first);
    }
};

// The sum over a block, in one order; thread 0 has it.
__device__ inline double over_block(double mine) {
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = mine;
    for (int half = THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    return sums[0];
}

// A row of the table tells of one tensor: address, elements, kind, and its first block.
struct Row { u64 at; i64 numel, kind, block; };

// A block sums the squares of a chunk of a tensor. Which thread adds what, and when, depends on the
// element's index alone.
extern "C" __global__ void square_parts(const Squares given) {
    const i64 tensor = reinterpret_cast<const i64*>(given.owner)[blockIdx.x];
    const Row row = reinterpret_cast<const Row*>(given.table)[tensor];
    const i64 first = (blockIdx.x - row.block) * CHUNK;
    const i64 end = first + CHUNK < row.numel ? first + CHUNK : row.numel;
    const bool aligned = row.at % sizeof(uint4) == 0;
    double sums[2] = {0, 0};
    for (i64 i = first + (i64)threadIdx.x * RUN; i < end; i += THREADS * RUN) {
        double run[RUN];
        if (aligned && i + RUN <= end) {
            load_kind<RUN>(row.kind, row.at, i, run);
        } else {
            for (int k = 0; k < RUN; k++) {
                double one[1] = {0};
                if (i + k < end) load_kind<1>(row.kind, row.at, i + k, one);
                run[k] = one[0];
            }
        }
        for (int k = 0; k < RUN; k++) sums[k % 2] = __fma_rn(run[k], run[k], sums[k % 2]);
    }
    const double sum = over_block(sums[0] + sums[1]);
    if (threadIdx.x == 0) reinterpret_cast<double*>(given.parts)[blockIdx.x] = sum;
}

// A block sums the parts of a tensor.
extern "C" __global__ void square_sums(const Squares given) {
    const Row row = reinterpret_cast<const Row*>(given.table)[blockIdx.x];
    const double* parts = reinterpret_cast<const double*>(given.parts) + row.block;
    const i64 count = (row.numel + CHUNK - 1) / CHUNK;
    double sum = 0;
    for (i64 i = threadIdx.x; i < count; i += THREADS) sum += parts[i];
    sum = over_block(sum);
    if (threadIdx.x == 0) reinterpret_cast<double*>(given.sums)[blockIdx.x] = sum;
}
"""


def source() -> str:
    """All kernels, in CUDA C++ 17: add_T, pack_S_T, square_parts and square_sums."""
    kinds = ", ".join(f"KIND_{TYPES[dtype]} = {kind}" for dtype, kind in KINDS.items())
    adds = [
        f'extern "C" __global__ void add_{t}(const Add given) '
        f"{{ stride(given.whole, given.numel, Adding<{t}>{{given}}); }}"
        for t in TYPES.values()
    ]
    packs = [
        f'extern "C" __global__ void pack_{s}_{t}(const Pack given) '
        f"{{ stride(given.whole, given.numel, Packing<{s}, {t}>{{given}}); }}"
        for s in TYPES.values()
        for t in TYPES.values()
    ]
    return "\n".join([HEAD, PRIMITIVES, f"enum {{ {kinds} }};", BODY, *adds, *packs, ""])


class CupyKernels:
    """`zero.kernels.Kernels` on one CUDA device: every operation is one launch, the squares two.

    Compiles the kernels, which CuPy then keeps on disk. What they are not made for (integers, more
    than 128 addends) is left to torch. Raises ImportError where there is no CuPy.
    """

    name = "cupy"

    def __init__(self, device: torch.device) -> None:
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise ImportError(
                f"no CuPy to be used ({error}): pip install 'mntrain[cuda12]', or 'mntrain[cuda13]'"
            ) from error
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._torch = TorchKernels()
        self._most_blocks = (
            BLOCKS * torch.cuda.get_device_properties(self._device).multi_processor_count
        )
        self._module = self._cupy.RawModule(code=source(), options=("-std=c++17",), backend="nvrtc")
        with self._cupy.cuda.Device(index):
            self._module.compile()
        self._functions: dict[str, Any] = {}
        self._tables: tuple[object, Tensor, Tensor] | None = None  # what was told last, and of what

    def add(self, addends: Sequence[Tensor], total: Tensor) -> None:
        """See `Kernels.add`."""
        if not can_add([addend.dtype for addend in addends], total.dtype):
            self._torch.add(addends, total)
            return
        given = np.zeros((), ADD)
        given["at"][: len(addends)] = [addend.data_ptr() for addend in addends]
        given["kind"][: len(addends)] = [KINDS[addend.dtype] for addend in addends]
        given["total"], given["count"] = total.data_ptr(), len(addends)
        given["numel"], given["whole"] = total.numel(), whole([*addends, total])
        self._launch(f"add_{TYPES[total.dtype]}", self._blocks(total.numel()), given)

    def pack(self, source: Tensor, scale: float, target: Tensor) -> None:
        """See `Kernels.pack`."""
        if scale == 0 or not {source.dtype, target.dtype} <= TYPES.keys():
            self._torch.pack(source, scale, target)
            return
        given = np.zeros((), PACK)
        given["source"], given["target"] = source.data_ptr(), target.data_ptr()
        given["numel"], given["whole"] = source.numel(), whole([source, target])
        given["scale"] = scale
        name = f"pack_{TYPES[source.dtype]}_{TYPES[target.dtype]}"
        self._launch(name, self._blocks(source.numel()), given)

    def square_sums(self, tensors: Sequence[Tensor]) -> Tensor:
        """See `Kernels.square_sums`."""
        if not {tensor.dtype for tensor in tensors} <= TYPES.keys():
            return self._torch.square_sums(tensors)
        table, owner = self._told(tensors)
        parts = torch.empty(len(owner), dtype=torch.float64, device=self._device)
        sums = torch.empty(len(tensors), dtype=torch.float64, device=self._device)
        given = np.zeros((), SQUARES)
        given["table"], given["owner"] = table.data_ptr(), owner.data_ptr()
        given["parts"], given["sums"] = parts.data_ptr(), sums.data_ptr()
        self._launch("square_parts", len(owner), given)
        self._launch("square_sums", len(tensors), given)
        return sums

    def _told(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The table of tensors on the device; the last one is kept, with the stream that has it."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        told = stream, tuple((t.data_ptr(), t.numel(), t.dtype) for t in tensors)
        if self._tables is None or self._tables[0] != told:
            table, owner = tables(tensors)
            both = torch.cat([table.view(-1), owner]).to(self._device, non_blocking=True)
            self._tables = told, both[: table.numel()], both[table.numel() :]
        return self._tables[1], self._tables[2]

    def _blocks(self, numel: int) -> int:
        return min(-(-numel // (THREADS * RUN)), self._most_blocks)

    def _launch(self, name: str, blocks: int, given: NDArray[Any]) -> None:
        """Launch a kernel on torch's current stream, with a structure that is passed by value."""
        if not blocks:
            return
        with self._cupy.cuda.Device(self._device.index), self._current_stream():
            if name not in self._functions:
                self._functions[name] = self._module.get_function(name)
            self._functions[name]((blocks,), (THREADS,), (given,))

    def _current_stream(self) -> Any:
        """Torch's current stream as CuPy's."""
        cuda = self._cupy.cuda
        stream = TorchStream(torch.cuda.current_stream(self._device).cuda_stream)
        if hasattr(cuda.Stream, "from_external"):  # from CuPy 14 on
            return cuda.Stream.from_external(stream)
        return cuda.ExternalStream(stream.address, self._device.index)


@dataclass(frozen=True)
class TorchStream:
    """A stream of torch's, by CUDA's protocol for streams in Python."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version, and the stream."""
        return 0, self.address


def can_add(addends: Sequence[torch.dtype], total: torch.dtype) -> bool:
    """Whether the kernels are made for a sum: of floats that its dtype widens, and not too many."""
    return (
        len(addends) <= MOST
        and {*addends, total} <= TYPES.keys()
        and (total == torch.float64 or torch.float64 not in addends)
    )


def whole(tensors: Sequence[Tensor]) -> int:
    """How many elements, from the first on, can be moved by runs of 16 bytes; 0 if not aligned."""
    if any(tensor.data_ptr() % 16 for tensor in tensors):
        return 0
    return tensors[0].numel() // RUN * RUN


def tables(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What `square_parts` is told of tensors, int64, in host memory.

    A row a tensor: address, elements, kind, its first block. And whose every block is: a tensor has
    one for every 32768 elements, whatever the device.
    """
    numels = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64)
    blocks = (numels + CHUNK - 1) // CHUNK
    rows = torch.tensor(
        [(tensor.data_ptr(), 0, KINDS[tensor.dtype], 0) for tensor in tensors], dtype=torch.int64
    ).view(-1, 4)
    rows[:, 1], rows[:, 3] = numels, blocks.cumsum(0) - blocks
    return rows, torch.repeat_interleave(torch.arange(len(tensors)), blocks)
