"""Sums in 8 bits between nodes: 1.016 bytes an element instead of 4.

Each block of 256 sums travels as a fp32 scale, the largest magnitude / 127, and integers from -127
to 127, rounded to nearest. What is rounded off is added to the next step's sums.

Source of blocks with a scale each: Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
ICLR 2022, arXiv 2110.02861; of the residuals: Seide et al., "1-Bit Stochastic Gradient Descent and
its Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014.
"""

import torch
from torch import Tensor

from zero.between_nodes import GatheredHook, runs

BLOCK = 256
LARGEST = 127


class Int8Hook(GatheredHook):
    """Exchanges node sums as 8-bit integers with a scale for each block, with error feedback.

    A block with a NaN or an infinity is decoded to NaN. So are fp64 sums beyond the range of fp32.
    """

    def code_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return a byte for each element and four for each block."""
        return numel + _blocks(numel) * torch.float32.itemsize

    def encode(self, sums: Tensor, code: Tensor) -> None:
        """Write scales, then integers, and leave in `sums` what is rounded off."""
        scales, integers = _parts(code, len(sums))
        done = 0
        for part, rounded in runs(sums, integers):
            for values, out in zip(_rows(part), _rows(rounded), strict=True):
                scale = (values.abs().amax(1, keepdim=True) / LARGEST).float()
                scales[done : done + len(values)] = scale.view(-1)
                done += len(values)
                scale = scale.to(values.dtype)
                divisor = torch.where(scale == 0, 1.0, scale)  # also of a NaN, which stays
                steps = (values / divisor).round_().clamp_(-LARGEST, LARGEST)
                out.copy_(steps.nan_to_num_(0.0))  # a cast of NaN is undefined
                values.sub_(out.to(values.dtype).mul_(scale))

    def decode(self, code: Tensor, total: Tensor) -> None:
        """Add integers times their scales."""
        scales, integers = _parts(code, len(total))
        done = 0
        for part, rounded in runs(total, integers):
            for values, steps in zip(_rows(part), _rows(rounded), strict=True):
                scale = scales[done : done + len(values)].to(values.dtype)
                done += len(values)
                values.add_(steps.to(values.dtype).mul_(scale.view(-1, 1)))


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _parts(code: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return views of a code: the scale of each block, and the integers."""
    end = _blocks(numel) * torch.float32.itemsize
    return code[:end].view(torch.float32), code[end : end + numel].view(torch.int8)


def _rows(part: Tensor) -> list[Tensor]:
    """Return the whole blocks of a flat tensor as rows, and the remainder as a row; views."""
    whole = len(part) // BLOCK * BLOCK
    rows = [part[:whole].view(-1, BLOCK), part[whole:].view(1, -1)]
    return [row for row in rows if row.numel()]


HOOKS = {"int8": Int8Hook}
