"""Flat tensors: views in a parameter's memory format, and sums, casts and squares."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

RUN = 1 << 16  # elements that the CPU handles at a time, so that they stay in its cache
VECTOR = 32  # bytes that a CUDA thread of torch's norm reads at a time, at most


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
