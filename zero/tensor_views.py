"""Views of flat memory in a parameter's shape and memory format."""

import torch
from torch import Tensor


def view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the elements of `flat` from `start` on, in the shape and strides of `like`. A view.

    PyTorch wants a gradient in its parameter's memory format (channels last, say), so elements are
    in the order in which `like` holds them in memory. A tensor with gaps counts as contiguous.
    """
    run = flat[start : start + like.numel()]
    if like.is_contiguous() or not _is_dense(like):
        return run.view(like.shape)
    return run.as_strided(like.shape, like.stride())


def flattened(tensor: Tensor, like: Tensor) -> Tensor:
    """Copy `tensor` (of the shape of `like`) into a new flat tensor, in the order of `like`."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    view(flat, 0, like).copy_(tensor)
    return flat


def order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions longer than 1 in the order of `view`, the outermost first."""
    long = [place for place, length in enumerate(tensor.shape) if length > 1]
    if tensor.is_contiguous() or not _is_dense(tensor):
        return tuple(long)
    return tuple(sorted(long, key=tensor.stride, reverse=True))


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills a range of memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True
