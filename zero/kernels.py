"""Arithmetic on flat tensors, and views of them in a parameter's memory format."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

RUN = 1 << 16  # elements that the CPU handles at a time, so that they stay in its cache
VECTOR = 32  # bytes that a CUDA thread of torch's norm reads at a time, at most
# Rows of squares take a sixth of the time of conversions to fp64, and differ by less than fp32 can
# tell.
ROW, LEAST_ROWS = 256, 64
EXACT = 1e-20, 1e30  # sums of squares between which fp32 holds all squares that count
COLUMNS = 8192  # int64 numbers of a row of a checksum, each with a factor of its own
ROW_BYTES = 8 * COLUMNS


Add = Callable[[Sequence[Tensor], Tensor], None]  # `add`, or what gives the same bits


def add(addends: Sequence[Tensor], total: Tensor) -> None:
    """Write the sum of addends, all flat, contiguous and of one length, to `total`. Local.

    Adds in order, in `sum_dtype`, and rounds once, on the current stream of their device. Addends
    have total's dtype or a narrower one; one of them may share total's memory.
    """
    if len(addends) == 1:
        total.copy_(addends[0])
    elif len(addends) == 2 and addends[0].dtype == addends[1].dtype == total.dtype:
        torch.add(addends[0], addends[1], out=total)  # 16 bits are widened on the way
    else:
        _add_many(addends, total)


def pack(source: Tensor, scale: float, target: Tensor) -> None:
    """Write `source` times `scale`, rounded to target's dtype, to `target`, of equal length.

    The product is computed in fp32, or fp64 if source is. A scale of 0 gives zeros for any
    values.
    """
    wide = sum_dtype(source.dtype)
    if scale == 0:
        target.zero_()  # not a product: the mean loss over no samples is NaN, and 0 * NaN is NaN
    elif scale == 1:
        target.copy_(source)
    elif source.dtype in (target.dtype, wide):
        torch.mul(source, scale, out=target)
    elif target.dtype == wide:
        target.copy_(source).mul_(scale)
    else:  # torch rounds 16-bit products to 16 bits, whatever the output's dtype
        target.copy_(source.to(wide).mul_(scale))


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor: fp64, one element each, on their device.

    Equal elements give equal bits at any address. An empty tensor gives 0.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    # One pass over each, which adds in fp64. On CUDA, the address of a tensor that does not begin
    # with a whole vector changes the order in which torch adds, and so do others' dtypes.
    placed = [tensor if tensor.data_ptr() % VECTOR == 0 else tensor.clone() for tensor in tensors]
    norms: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        at = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        like = torch._foreach_norm([placed[i] for i in at], 2, dtype=torch.float64)
        norms.update(zip(at, like, strict=True))
    return torch.stack([norms[i] for i in range(len(tensors))]).square()


def power_sum(tensors: Iterable[Tensor], p: float) -> Tensor:
    """Return the sum of p-th powers of all elements, or their maximum if p is infinite.

    In fp64 and 0-dim: of fp32 tensors on the CPU, squares of ROW elements are summed in fp32, and
    their sums in fp64. Without elements it is 0.
    """
    flat = [tensor.reshape(-1) for tensor in tensors if tensor.numel()]
    flat = [tensor.abs() if tensor.is_complex() else tensor for tensor in flat]
    if not flat:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    if p == 2 and any(tensor.device.type != "cpu" for tensor in flat):
        return square_sums(flat).sum()
    if p == 2:
        parts = [_square_sum(tensor) for tensor in flat]
    else:
        parts = [_power_sum(run, p) for tensor in flat for run in runs(tensor)]
    return torch.stack(parts).max() if math.isinf(p) else torch.stack(parts).sum()


def _square_sum(flat: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor on the CPU: fp64, 0-dim."""
    rows = len(flat) // ROW
    if flat.dtype == torch.float32 and rows >= LEAST_ROWS:
        rest = flat[rows * ROW :]
        norms = torch.linalg.vector_norm(flat[: rows * ROW].unflatten(0, (rows, ROW)), dim=1)
        total: Tensor = norms.double().square().sum() + _power_sum(rest, 2)
        if EXACT[0] < total < EXACT[1]:
            return total
    return torch.stack([_power_sum(run, 2) for run in runs(flat)]).sum()


def _power_sum(run: Tensor, p: float) -> Tensor:
    """Return the sum of p-th powers of a run's elements, or their maximum: fp64, 0-dim."""
    norm: Tensor = torch.linalg.vector_norm(run.double(), p)
    return norm if math.isinf(p) else norm.pow(p)


def nan_unless_finite(tensor: Tensor) -> float | Tensor:
    """Return 0 for a tensor that is finite, else NaN; of a device a tensor, not waited for."""
    if tensor.device.type != "cpu":
        return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)) * 0
    # A finite sum needs finite addends.
    finite = bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
    return 0.0 if finite else math.nan


@torch.no_grad()
def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number of the bits of dense tensors: int64, 0-dim, on the device of the first.

        tensor 0      row | row | rest      the sums of all rows, column by column, and of each row,
        tensor 1      row | rest            x odd numbers by column, row and tensor: 64 bits
        the rests     row | row

    Sums and products are modulo 2**64, so any order of additions gives the same. A difference in
    one number changes its column's sum. Numbers that changed places within a column change the sums
    of their rows. Several differences cancel with a chance of about 1 in 8,192 at most.

    Reads each tensor once, and copies of it at most 64 KiB, unless it is not contiguous. Does not
    wait for the device.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    sums, rests = list[Tensor](), list[Tensor]()
    for tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = len(data) // ROW_BYTES * ROW_BYTES
        if whole:
            sums.append(_bit_sums(data[:whole]).to(device))
        rests.append(data[whole:].to(device))
    size = sum(map(len, rests))
    if size:
        joined = torch.zeros(-(-size // ROW_BYTES) * ROW_BYTES, dtype=torch.uint8, device=device)
        torch.cat(rests, out=joined[:size])
        sums.append(_bit_sums(joined))
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    odd = _odd_numbers(COLUMNS + 1 + len(sums), device)
    return (torch.stack(sums) * odd[: COLUMNS + 1] * odd[COLUMNS + 1 :, None]).sum()


def _bit_sums(data: Tensor) -> Tensor:
    """Return the sum of each column, and that of all rows, each times an odd number of its own."""
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()
    rows = data.view(torch.int64).view(-1, COLUMNS)
    factors = torch.arange(1, 2 * len(rows), 2, device=data.device)
    by_row = rows.sum(1)
    by_row ^= by_row >> 32  # so that the row of a sign counts, too
    return torch.cat([rows.sum(0), (by_row * factors).sum().view(1)])


@cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Return random odd numbers, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    low, high = -(2**63), 2**63 - 1
    drawn = torch.randint(low, high, (count,), generator=generator, dtype=torch.int64, device="cpu")
    return (drawn | 1).to(device)


def uses(tensor: Tensor) -> int:
    """Return how many tensors have a tensor's memory; an object over its storage counts, too."""
    # A script may keep such a storage, which is one object of Python while it lives.
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def expect_flat(tensor: Tensor, wire: torch.dtype | None = None) -> None:
    """Raise ValueError for a tensor that no collective takes, or not with a wire dtype. Local."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"a collective takes a flat contiguous tensor, not one of shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}: give the view(-1) of a "
            "contiguous one"
        )
    if tensor.is_conj() or tensor.is_neg():  # bytes travel
        raise ValueError(
            "a collective takes no lazily conjugated or negated tensor: give its "
            "resolve_conj().resolve_neg()"
        )
    if wire is not None and tensor.is_complex():
        raise ValueError(f"{tensor.dtype} does not travel in {wire}: leave wire= out")


@cache
def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums accumulate: fp32 or wider; int64 for integers."""
    wide = torch.float32 if dtype.is_floating_point else torch.int64
    return torch.promote_types(dtype, wide)


def _add_many(addends: Sequence[Tensor], total: Tensor) -> None:
    shared = any(addend.data_ptr() == total.data_ptr() for addend in addends[1:])
    beside = shared or total.dtype != sum_dtype(total.dtype)
    run = addends[0].to(sum_dtype(total.dtype), copy=True) if beside else total.copy_(addends[0])
    for addend in addends[1:]:
        run.add_(addend)
    if beside:
        total.copy_(run)


@torch.no_grad()
def copy_scaled(target: Tensor, gradient: Tensor | None, scale: float) -> Tensor | None:
    """Write a gradient times a scale into `target`, in one pass; zeros if there is none.

    Returns the target, or None where there was no gradient.
    """
    if gradient is None:
        target.zero_()
        return None
    pack(gradient.to_dense(), scale, target)
    return target


def rescale(gradients: Sequence[Tensor], scale: float) -> None:
    """Multiply gradients in place, on a GPU in few kernels; 0 gives zeros for any values."""
    if scale == 0:
        for gradient in gradients:
            gradient.zero_()  # not a product: 0 * NaN is NaN
    elif scale != 1 and gradients:
        torch._foreach_mul_(list(gradients), scale)


def runs(flat: Tensor) -> tuple[Tensor, ...]:
    """Return parts of a flat tensor that the CPU's cache holds; on a GPU, the whole."""
    return flat.split(RUN) if flat.device.type == "cpu" else (flat,)


def view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the elements of `flat` from `start` on, in the shape and strides of `like`. A view.

    PyTorch wants a gradient in its parameter's memory format (channels last, say), so elements are
    in the order in which `like` holds them in memory. A tensor with gaps counts as contiguous.
    """
    run = flat[start : start + like.numel()]
    if like.is_contiguous() or not _is_dense(like):
        return run.view(like.shape)
    return run.as_strided(like.shape, like.stride())


def without_repeats(tensor: Tensor) -> Tensor:
    """Return a view of the first element along every dimension that was expanded.

    Unlike the expanded tensor, the view can be written.
    """
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def own_view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """Return `view` with a storage of its own: exactly its bytes of the memory of `flat`.

    So torch.save writes these bytes and not all of `flat`. The memory of `flat` lives on with it.
    """
    viewed, size = view(flat, start, like), flat.element_size()
    if flat.is_meta:  # without bytes
        return viewed
    first = viewed.storage_offset() * size
    storage = flat.untyped_storage()[first : first + viewed.numel() * size]
    own = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return own.set_(storage, 0, viewed.shape, viewed.stride())


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a dense tensor whose elements lie in memory as in a `view` like `like`.

    The tensor itself if its elements do, otherwise a copy.
    """
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    if like.is_contiguous() or not _is_dense(like):
        return tensor.contiguous()
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)


def order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions longer than 1 in the order of `view`, the outermost first."""
    long = [place for place, length in enumerate(tensor.shape) if length > 1]
    if tensor.is_contiguous() or not _is_dense(tensor):
        return tuple(long)
    return tuple(sorted(long, key=tensor.stride, reverse=True))


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills a range of memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True
