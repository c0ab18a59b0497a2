"""Numbers to add, cast and square, and what comes out, by fp64 with a rounding at each step."""

import functools

import torch

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [0, 1, 7, 1000, 1_000_003]


def far_apart(dtypes, numel):
    """A tensor of each dtype; added in another order they make other sums."""
    generator = torch.Generator().manual_seed(len(dtypes))
    tensors = []
    for dtype in dtypes:
        exponents = torch.randint(-10, 11, (numel,), generator=generator).double()
        values = torch.randn(numel, generator=generator, dtype=torch.float64) * 2.0**exponents
        tensors.append((values if dtype.is_floating_point else values.abs() % 100).to(dtype))
    return tensors


def bits(tensor):
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def rounded(values, dtype):
    """Exact results in fp64, as an operation in fp32 would have rounded them, if `dtype` asks.

    A sum or a product of two fp32 numbers, made in fp64, is off by less than shows in fp32.
    """
    return values if dtype == torch.float64 else values.float().double()


def summed(addends, dtype):
    """The sum of addends, in their order, in fp32 or wider, rounded once to `dtype`."""
    if not dtype.is_floating_point:
        return functools.reduce(torch.add, [addend.long() for addend in addends]).to(dtype)
    total = addends[0].double()
    for addend in addends[1:]:
        total = rounded(total + addend.double(), dtype)
    return total.to(dtype) if dtype == torch.float64 else total.float().to(dtype)


def packed(values, scale, dtype):
    """Values times a scale, the product in fp32 (fp64 of fp64), rounded once to `dtype`."""
    factor = torch.tensor(scale, dtype=torch.promote_types(values.dtype, torch.float32))
    product = rounded(values.double() * factor.double(), values.dtype)
    return (product if values.dtype == torch.float64 else product.float()).to(dtype)
