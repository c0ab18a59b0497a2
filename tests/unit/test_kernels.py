"""Sums, casts and squares by torch's kernels; whose kernels are chosen; that CuPy's compile."""

import ctypes
import functools
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import FLOATS, SIZES, bits, far_apart, packed, summed

from mntrain import kernels
from mntrain.cupy_kernels import CHUNK, MOST, TYPES, CupyKernels, can_add, source, tables, whole
from mntrain.kernels import KernelComparison, choose, line, measure, winners
from zero.collectives import SingleProcessCollectives
from zero.kernels import TorchKernels
from zero.norms import global_norm

INTEGERS = [torch.uint8, torch.int32, torch.int64]
TORCH = TorchKernels()


# Sums.


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_addends_are_added_in_their_order_and_rounded_once(dtype, numel, count):
    addends = far_apart([dtype] * count, numel)
    expected = summed(addends, dtype)
    total = torch.full((numel,), 77, dtype=dtype)
    TORCH.add(addends, total)
    assert bits(total) == bits(expected)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_sum_may_lie_where_any_addend_does(dtype, count):
    for place in range(count):
        addends = far_apart([dtype] * count, 1000)
        before = [addend.clone() for addend in addends]
        TORCH.add(addends, addends[place])
        assert bits(addends[place]) == bits(summed(before, dtype))
        for index, (addend, was) in enumerate(zip(addends, before, strict=True)):
            assert index == place or bits(addend) == bits(was)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("place", [None, 0, 1, 2])
def test_addends_of_the_wire_are_widened_into_a_sum_wherever_it_lies(wire, own, place):
    dtypes = [own if index == place else wire for index in range(3)]
    addends = far_apart(dtypes, 1000)
    expected = summed(addends, own)
    total = torch.empty(1000, dtype=own) if place is None else addends[place]
    TORCH.add(addends, total)
    assert bits(total) == bits(expected)


def test_a_sum_of_16_bits_overflows_only_in_the_end():
    big = torch.full((3,), 60000.0, dtype=torch.float16)
    total = torch.empty_like(big)
    TORCH.add([big, big, -big], total)
    assert total.tolist() == big.tolist()
    TORCH.add([big, big, big], total)
    assert total.tolist() == [math.inf] * 3


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite_stays_so_in_sums(dtype):
    odd = torch.tensor([math.nan, math.inf, math.inf, -math.inf], dtype=dtype)
    other = torch.tensor([1, 1, -math.inf, 1], dtype=dtype)
    for addends in ([odd, other], [odd, other, torch.ones_like(odd)]):
        total = torch.empty_like(odd)
        TORCH.add(addends, total)
        assert total.isnan().tolist() == [True, False, True, False]
        assert total[[1, 3]].tolist() == [math.inf, -math.inf]


# Casts and products.


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.1, 3e-5, -0.0])
def test_a_product_is_made_in_fp32_or_wider_and_rounded_once(dtype, target, scale):
    for numel in SIZES if scale == 0.1 else (1000,):
        (values,) = far_apart([dtype], numel)
        out = torch.full((numel,), 77, dtype=target)
        TORCH.pack(values, scale, out)
        assert out.equal(packed(values, scale, target))


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_scale_of_zero_makes_zeros_of_what_is_not_finite(dtype, target):
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=dtype)
    out = torch.ones(4, dtype=target)
    TORCH.pack(odd, 0.0, out)
    assert out.tolist() == [0.0] * 4
    TORCH.pack(odd, 0.5, out)
    assert out.isnan().tolist() == [True, False, False, False]
    assert out[1:].tolist() == [math.inf, -math.inf, 0.5]


# Squares.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_squares_are_summed_in_fp64(dtype):
    tensors = [torch.randn(numel, dtype=torch.float64).to(dtype) for numel in SIZES]
    sums = TORCH.square_sums(tensors)
    assert sums.dtype == torch.float64
    expected = [math.fsum(x * x for x in tensor.tolist()) for tensor in tensors]
    assert sums.tolist() == pytest.approx(expected, rel=1e-12, abs=0)
    assert sums[SIZES.index(0)] == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_squares_have_equal_bits_wherever_elements_lie(dtype):
    values, room = torch.randn(100_003).to(dtype), torch.empty(100_010, dtype=dtype)
    found = {float(TORCH.square_sums([values])) for _ in range(3)}
    for start in range(5):
        moved = room[start : start + len(values)].copy_(values)
        found.add(float(TORCH.square_sums([moved])))
    assert len(found) == 1


def test_squares_tell_what_is_not_finite_and_neither_overflow_nor_vanish():
    tensors = [torch.tensor([x, 1.0]) for x in (math.nan, math.inf, 3e38, 1e-42)]
    nan, inf, large, _ = TORCH.square_sums(tensors).tolist()
    assert math.isnan(nan)
    assert inf == math.inf
    assert large == pytest.approx(9e76)
    assert float(TORCH.square_sums([torch.tensor([1e-42])])) > 0


def test_squares_of_no_tensors_are_none():
    assert TORCH.square_sums([]).tolist() == []


class Known(TorchKernels):
    """Gives numbers that nobody else would."""

    def square_sums(self, tensors):
        assert all(tensor.numel() for tensor in tensors)
        return torch.full((len(tensors),), 12.5, dtype=torch.float64)


def test_a_norm_off_the_cpu_is_of_the_kernels_squares_and_only_that_one():
    afar = [torch.empty(numel, device="meta") for numel in (3, 0, 5)]
    assert global_norm(SingleProcessCollectives(), afar, 2.0, Known()) == 5.0
    here = [torch.tensor([3.0, 4.0])]
    assert (
        global_norm(SingleProcessCollectives(), here, 2.0, Known()) == 5.0
    )  # of the CPU's own way: not 3.5
    assert (
        global_norm(SingleProcessCollectives(), [2 * part for part in here], 1.0, Known()) == 14.0
    )
    assert global_norm(SingleProcessCollectives(), [], 2.0, Known()) == 0.0


# The choice.

CUDA = torch.device("cuda", 0)


class Faulty(TorchKernels):
    """Rounds one sum wrong in the last place."""

    name = "cupy"

    def add(self, addends, total):
        super().add(addends, total)
        total[-1:].view(torch.uint8)[0] ^= 1


def invented(**ratios):
    """Times of two cases an operation of which CuPy's are so many times as fast, in the mean."""
    found = []
    for name, ratio in ratios.items():
        found += [KernelComparison(name, "few", 1e-5 * ratio / 2, 1e-5)]
        found += [KernelComparison(name, "many", 1e-3 * ratio * 2, 1e-3)]
    return found


def test_what_is_faster_by_more_than_noise_is_kept_operation_by_operation():
    times = invented(add=3.0, pack=0.5, square_sums=1.05)
    assert winners(times) == {"add"}
    assert line(times) == (
        "add by CuPy (3.0x torch's speed), pack by torch (CuPy has 0.5x its speed), "
        "square_sums by torch (CuPy has 1.1x its speed)"
    )
    assert winners(invented(add=1.2, pack=1.2, square_sums=1.2)) == set(kernels.OPERATIONS)


def test_what_is_fast_and_wrong_is_not_kept():
    times = [*invented(add=9.0, pack=9.0), KernelComparison("add", "odd", 9.0, 1.0, same=False)]
    assert winners(times) == {"pack"}
    assert line(times).startswith("add by torch (CuPy's result differs), pack by CuPy (9.0x")


def test_measuring_compares_results_and_times_of_every_operation(monkeypatch):
    monkeypatch.setattr(kernels, "NUMELS", (256, 1024))
    compared = measure(torch.device("cpu"), Faulty())
    assert {case.operation for case in compared} == set(kernels.OPERATIONS)
    assert {case.operation for case in compared if not case.same} == {"add"}
    assert len({case.what for case in compared if case.operation == "add"}) == 6
    assert all(case.torch_s > 0 and case.cupy_s > 0 for case in compared)


def test_on_the_cpu_kernels_are_torchs_and_cupy_is_not_tried():
    chosen = choose(torch.device("cpu"), make=pytest.fail)
    assert (chosen.name, chosen.why) == ("torch", "torch's kernels: the device is cpu")
    total = torch.empty(2)
    chosen.add([torch.ones(2), torch.ones(2)], total)
    assert total.tolist() == [2.0, 2.0]


def test_without_cupy_kernels_are_torchs_and_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    chosen = choose(CUDA)
    assert chosen.name == "torch"
    assert "ImportError" in chosen.why
    assert "pip install 'mntrain[cuda12]'" in chosen.why
    with pytest.raises(ImportError, match=r"mntrain\[cuda12\]"):
        CupyKernels(CUDA)


@pytest.mark.parametrize("error", [RuntimeError, OSError, AttributeError])
def test_a_cupy_that_fails_leaves_torchs_kernels_and_says_why(error):
    def make(device):
        raise error("the driver is too old\nand much more")

    chosen = choose(CUDA, make)
    assert chosen.name == "torch"
    assert chosen.why == (
        f"torch's kernels: CuPy's do not work here: {error.__name__}: the driver is too old"
    )


def test_each_operation_goes_to_the_one_that_was_chosen():
    ours, theirs = TorchKernels(), Faulty()
    both = kernels.SelectedKernels({"add": theirs, "pack": ours, "square_sums": theirs}, "why")
    assert (both.name, both.why) == ("mixed", "why")
    assert (both.add, both.pack, both.square_sums) == (theirs.add, ours.pack, theirs.square_sums)
    assert kernels.SelectedKernels(dict.fromkeys(kernels.OPERATIONS, theirs), "").name == "cupy"


def test_importing_the_choice_does_not_import_cupy(tmp_path):
    (tmp_path / "cupy.py").write_text("raise AssertionError('cupy was imported')\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    program = "import mntrain.kernels, sys; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=100)


# What CuPy's kernels are told, and their source.


def test_the_kernels_add_only_what_a_float_total_widens():
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    assert can_add([single, half, torch.float16], single)
    assert can_add([double, single, half], double)
    assert not can_add([single, double], single)
    assert not can_add([torch.int32, torch.int32], torch.int32)
    assert can_add([half] * MOST, half)
    assert not can_add([half] * (MOST + 1), half)


def test_runs_are_of_aligned_tensors_only():
    flat = torch.empty(107, dtype=torch.bfloat16)
    assert flat.data_ptr() % 16 == 0
    assert whole([flat]) == 104
    assert whole([flat[8:]]) == 96
    assert whole([flat[:99], flat[1:100]]) == 0
    assert whole([flat[:7]]) == 0


def test_every_chunk_of_every_tensor_has_a_block_of_its_own():
    numels = [3, 0, CHUNK, CHUNK + 1, 0, 1]
    tensors = [torch.empty(n, dtype=d) for n, d in zip(numels, [*FLOATS, *FLOATS], strict=False)]
    rows, owner = tables(tensors)
    assert owner.tolist() == [0, 2, 3, 3, 5]
    assert rows[:, 0].tolist() == [tensor.data_ptr() for tensor in tensors]
    assert rows[:, 1].tolist() == numels
    assert [list(TYPES)[kind] for kind in rows[:, 2]] == [tensor.dtype for tensor in tensors]
    assert rows[[0, 2, 3, 5], 3].tolist() == [0, 1, 2, 4]


@functools.cache
def nvrtc():
    """NVIDIA's compiler, from where the system or a wheel has it; None where there is none."""
    found = ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"]
    if spec := importlib.util.find_spec("nvidia"):
        folders = map(Path, spec.submodule_search_locations)
        found += [str(path) for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*")]
    for name in found:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compiled(text, *options):
    """The PTX of CUDA source."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    made = library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"", 0, None, None)
    assert made == 0
    try:
        given = [option.encode() for option in options]
        done = library.nvrtcCompileProgram(
            program, len(given), (ctypes.c_char_p * len(given))(*given)
        )
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        assert done == 0, log.value.decode()
        assert "warning" not in log.value.decode()
        library.nvrtcGetPTXSize(program, ctypes.byref(size))
        ptx = ctypes.create_string_buffer(size.value)
        library.nvrtcGetPTX(program, ptx)
        return ptx.value.decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@pytest.mark.skipif(nvrtc() is None, reason="no NVRTC here: pip install nvidia-cuda-nvrtc-cu12")
@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_kernels_compile_to_what_they_promise(architecture):
    # As CuPy compiles them, which flushes what the source does not forbid.
    options = ["-std=c++17", "-ftz=true", "--device-as-default-execution-space"]
    ptx = compiled(source(), *options, f"-arch={architecture}")
    names = {"square_parts", "square_sums"}
    names |= {f"add_{t}" for t in TYPES.values()}
    names |= {f"pack_{s}_{t}" for s in TYPES.values() for t in TYPES.values()}
    assert set(re.findall(r"\.entry (\w+)", ptx)) == names
    assert ".ftz" not in ptx  # small numbers are not flushed
    assert "fma.rn.f32" not in ptx  # sums and products are rounded one by one
    assert ".local" not in ptx  # nothing spills, nor is copied to be indexed
    for part in ptx.split(".entry ")[1:]:
        name = part.split("(")[0]  # 16 bytes at a time, but for results of sums of squares
        assert name == "square_sums" or re.search(r"\bld(\.global)?\.(v4\..32|v2\..64)\b", part)
        assert name.startswith("square") or re.search(r"\bst\.global\.v4\.u32\b", part)
