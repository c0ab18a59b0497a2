"""Codes of flat tensors, and what they lack, against plain numpy."""

import math

import numpy as np
import pytest
import torch

from zero.comm_hooks.codes import BLOCK, CHUNK, BlockCode, ChunkCode
from zero.kernels import RUN

SIZES = [0, 1, 2, 3, 255, 256, 257, 1003, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77, RUN + 301]
CODES = [BlockCode(), ChunkCode(64 / CHUNK), ChunkCode(0.3), ChunkCode(1.0)]
NAMES = ["8 bits", "64 of 4096", "30 %", "all"]
codes = pytest.mark.parametrize("code", CODES, ids=NAMES)


def values_of(numel, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 12, (numel,), generator=generator)
    digits = torch.randn(numel, generator=generator, dtype=torch.float64)
    return (digits * 2.0 ** exponents.double()).to(dtype)


def sent(code, values):
    """Decode a code of flat values; return that, and what the code lacks."""
    written = torch.full((code.nbytes(len(values)),), 255, dtype=torch.uint8)
    left, total = values.clone(), torch.zeros_like(values)
    code.encode(left, written)
    code.decode(written, total)
    twice = total.clone()
    code.decode(written, twice)
    torch.testing.assert_close(twice, 2 * total, rtol=1e-6, atol=0, equal_nan=True)
    return total, left


def in_blocks(values, largest):
    parts = [np.zeros(0, values.dtype)]
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        scale = np.float32(np.abs(block).max() / block.dtype.type(largest)).astype(block.dtype)
        parts.append(np.rint(block / (scale or 1)).clip(-largest, largest) * scale)
    return np.concatenate(parts)


def of_chunks(values, density):
    made = np.zeros_like(values)
    for start in range(0, len(values), CHUNK):
        chunk = values[start : start + CHUNK]
        places = np.argsort(-np.abs(chunk), kind="stable")[: math.ceil(len(chunk) * density)]
        size = np.abs(chunk[places]).astype(np.float64)
        high = size >= size.mean()
        levels = np.where(high, size[high].mean(), size[~high].mean() if (~high).any() else 0)
        signed = np.copysign(levels, chunk[places])
        made[start + places] = signed.astype(np.float32).astype(values.dtype)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_codes_stand_for_what_numpy_rounds_or_selects(numel, dtype):
    values = values_of(numel, dtype)
    for code, expected in [
        (BlockCode(), in_blocks(values.numpy(), 127)),
    ]:
        total, _ = sent(code, values)
        assert np.array_equal(total.numpy(), expected)
    for density in (64 / CHUNK, 0.3, 1.0):
        total, _ = sent(ChunkCode(density), values)
        # Sums of magnitudes may round differently in fp64, and so by an ulp in fp32.
        np.testing.assert_allclose(total.numpy(), of_chunks(values.numpy(), density), rtol=1.3e-7)


@codes
@pytest.mark.parametrize("numel", SIZES)
def test_what_is_sent_and_what_is_left_are_the_values(code, numel):
    values = values_of(numel)
    total, left = sent(code, values)
    rounding = 2.0**-24 * max(
        values.abs().tolist(), default=0.0
    )  # of what is left, beside a larger magnitude
    both = total.double() + left.double()
    torch.testing.assert_close(both, values.double(), rtol=2e-7, atol=rounding)


@codes
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 3e-44, 3e38, -3e38])
def test_zeros_and_the_ends_of_the_range_are_sent_or_left(code, value):
    values = torch.full((300,), value)
    total, left = sent(code, values)
    assert torch.equal(total + left, values)


@codes
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("place", [0, 299, 5999])
def test_what_is_not_finite_arrives_and_is_left_so(code, value, place):
    values = values_of(6000, torch.float64)
    values[place] = value
    total, left = sent(code, values)
    assert not total.isfinite().all()
    assert not left.isfinite().all()


def test_codes_have_the_bytes_that_are_documented():
    assert BlockCode().nbytes(2560) == 2560 + 40
    assert BlockCode().nbytes(3) == 3 + 4
    assert ChunkCode(64 / CHUNK).nbytes(10 * CHUNK) == 10 * (96 + 16 + 8)
    # 65 of them: 780 bits of indices, 130 bits, and two magnitudes of each of two chunks.
    assert ChunkCode(64 / CHUNK).nbytes(CHUNK + 5) == 98 + 17 + 16
