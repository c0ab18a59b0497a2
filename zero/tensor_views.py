"""Tensors of a parameter's shape inside flat memory."""

import torch
from torch import Tensor


def view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """The elements of `flat` from `start` on, shaped as `like` and in its order. A view.

    torch wants a gradient to lie in memory as its parameter does (channels last, say): so the
    elements stand in the order in which `like` holds them in memory. A tensor that does not fill
    one run of memory counts as contiguous.
    """
    run = flat[start : start + like.numel()]
    if like.is_contiguous() or not _is_dense(like):
        return run.view(like.shape)
    return run.as_strided(like.shape, like.stride())


def lies_as(tensor: Tensor, like: Tensor) -> bool:
    """Whether a tensor is what `view` could give: one run of memory, in the order of `like`."""
    if tensor.is_contiguous() and like.is_contiguous():
        return True
    return tensor.stride() == like.stride() and _is_dense(tensor)


def run_of(tensor: Tensor) -> Tensor:
    """The run of memory that a tensor fills, flat. A view."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def flattened(tensor: Tensor, like: Tensor) -> Tensor:
    """A new flat tensor that holds `tensor` (of the shape of `like`) in the order of `like`."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    view(flat, 0, like).copy_(tensor)
    return flat


def order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions longer than 1 in the order in which `view` lays them, the outermost first."""
    long = [place for place, length in enumerate(tensor.shape) if length > 1]
    if tensor.is_contiguous() or not _is_dense(tensor):
        return tuple(long)
    return tuple(sorted(long, key=tensor.stride, reverse=True))


def nbytes(tensor: Tensor) -> int:
    """The bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills one run of memory, in whatever order of its dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True
