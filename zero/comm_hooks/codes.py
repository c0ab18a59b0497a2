"""Codes of flat tensors that travel between nodes, and lose something.

    code          elements     bytes each          what they stand for
    BlockCode     all          1.016               integers from -127 to 127, times the scale of 256
    ChunkCode     of 4,096,    0.0293, if 64 of    a sign and one of two magnitudes for each of the
                  the largest  4,096 are sent      largest, with its index

Encoding leaves in a tensor what the code lacks, which the sender keeps and adds to what it sends
next (error feedback). So the sum of all that is sent and kept is that of all that was to be sent.

Sources of blocks with a scale each: Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", ICLR 2022, arXiv 2110.02861; of the largest of chunks, in 2 bits: Sarfi et al.,
"Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv 2508.15706; of error
feedback: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs", Interspeech 2014.
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from zero.kernels import runs

ALIGNED_BYTES = 8  # of a code, so that its parts can be viewed as any dtype
BLOCK = 256
MAX_INTEGER = 127  # of a block
CHUNK = 4096
INDEX_BITS = 12  # of an index in a chunk
FP32 = torch.float32.itemsize


class Code(Protocol):
    """Format in which flat tensors of fp32 or fp64 travel in fewer bytes."""

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the code of so many elements."""

    def encode(self, values: Tensor, code: Tensor) -> None:
        """Write the code of flat values, and subtract from them what it decodes to.

        `code` has `nbytes` elements of uint8. Values that are not finite, or beyond the range of
        fp32, give a code that is decoded to some that are not finite, and leave such values.
        """

    def decode(self, code: Tensor, total: Tensor) -> None:
        """Add what a code stands for to flat sums."""


class BlockCode:
    """Integers of 8 bits, rounded to nearest, with a fp32 scale for each 256 of them.

    The scale is the largest magnitude / 127. A block with a NaN or an infinity is decoded to NaN.
    """

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the scales and the integers."""
        return -(-numel // BLOCK) * FP32 + numel

    def encode(self, values: Tensor, code: Tensor) -> None:
        """Write scales, then integers, and leave in `values` what is rounded off."""
        for rows, scales, written in self._blocks(values, code):
            scale = (rows.abs().amax(1, keepdim=True) / MAX_INTEGER).float()
            scales.copy_(scale.view(-1))
            scale = scale.to(rows.dtype)
            divisor = torch.where(scale == 0, 1.0, scale)  # also of a NaN, which stays
            steps = (rows / divisor).round_().clamp_(-MAX_INTEGER, MAX_INTEGER)
            integers = steps.nan_to_num_(0.0).to(torch.int8)  # a cast of NaN is undefined
            written.copy_(integers)
            rows.sub_(integers.to(rows.dtype).mul_(scale))

    def decode(self, code: Tensor, total: Tensor) -> None:
        """Add integers times their scales."""
        for rows, scales, written in self._blocks(total, code):
            rows.add_(written.to(rows.dtype).mul_(scales.to(rows.dtype).view(-1, 1)))

    def _blocks(self, flat: Tensor, code: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield rows of at most a block, with views of their scales and integers."""
        end = -(-len(flat) // BLOCK) * FP32
        scales = code[:end].view(torch.float32)
        integers = code[end : self.nbytes(len(flat))].view(torch.int8)
        done = 0
        for run in runs(flat):
            for rows in _rows(run, BLOCK):
                start, done = done, done + rows.numel()
                of_rows = scales[start // BLOCK : -(-done // BLOCK)]
                yield rows, of_rows, integers[start:done].view(rows.shape)


class ChunkCode:
    """The largest elements of each 4,096, a part `density` of them and at least one, in 2 bits.

    Each stands for one of two magnitudes of its chunk, with its sign: the means over what is sent
    that is at least as large as the mean, and over the rest. A chunk with a NaN or an infinity is
    decoded to one that is not finite.
    """

    def __init__(self, density: float) -> None:
        self._density = density

    def count(self, chunk: int) -> int:
        """Return how many elements of a chunk of so many are sent."""
        return math.ceil(chunk * self._density)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the magnitudes in fp32, the indices in 12 bits, and 2 bits each."""
        return sum(self._section_bytes(numel))

    def encode(self, values: Tensor, code: Tensor) -> None:
        """Write magnitudes, indices and bits, and leave what they lack."""
        if not len(values):
            return
        magnitudes, places, bits = [], [], []
        for rows in _rows(values, CHUNK):
            place = largest(rows.abs(), self.count(rows.shape[1]))
            sent = rows.gather(1, place)
            size = sent.abs().double()
            high = size >= size.mean(1, keepdim=True)
            pair = torch.stack([_mean_where(~high, size), _mean_where(high, size)], 1).float()
            magnitudes.append(pair.view(-1))
            places.append(place.reshape(-1))
            bits.append((high.to(torch.uint8) | (sent < 0).to(torch.uint8) << 1).view(-1))
            rows.scatter_(1, place, sent - _signed(pair, bits[-1].view(sent.shape), rows.dtype))
        parts = torch.cat(magnitudes), _pack_indices(torch.cat(places)), _pack(torch.cat(bits), 2)
        for section, part in zip(self._sections(code, len(values)), parts, strict=True):
            section.copy_(part)

    def decode(self, code: Tensor, total: Tensor) -> None:
        """Add the values at their indices, of which no two of a chunk are equal."""
        magnitudes, packed, packed_bits = self._sections(code, total.numel())
        sent = self._sent(total.numel())
        places, bits = _unpack_indices(packed, sent), _unpack(packed_bits, 2, sent)
        chunks = start = 0
        for rows in _rows(total, CHUNK):
            shape = len(rows), self.count(rows.shape[1])
            pair = magnitudes[2 * chunks : 2 * (chunks + len(rows))].view(-1, 2)
            part = slice(start, start + math.prod(shape))
            values = _signed(pair, bits[part].view(shape), rows.dtype)
            rows.scatter_add_(1, places[part].view(shape), values)
            chunks, start = chunks + len(rows), part.stop

    def _sent(self, numel: int) -> int:
        whole, rest = divmod(numel, CHUNK)
        return whole * self.count(CHUNK) + self.count(rest)

    def _section_bytes(self, numel: int) -> tuple[int, int, int]:
        sent = self._sent(numel)
        return -(-numel // CHUNK) * 2 * FP32, -(-sent * INDEX_BITS // 8), -(-sent * 2 // 8)

    def _sections(self, code: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of a code: the magnitudes, the packed indices, and the packed bits."""
        magnitudes, places, bits = code[: self.nbytes(numel)].split(self._section_bytes(numel))
        return magnitudes.view(torch.float32), places, bits


def aligned(nbytes: int) -> int:
    """Return a number of bytes, rounded up to where a view of any dtype may begin."""
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def largest(magnitudes: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest in the last dimension; a NaN is the largest."""
    if magnitudes.device.type != "cpu":
        return torch.topk(magnitudes, count, sorted=False).indices
    length = magnitudes.shape[-1]
    rest = length - count  # torch.topk takes 8 times as long as numpy's partition
    order = magnitudes.numpy().argpartition(min(rest, length - 1))
    return torch.from_numpy(order[..., rest:])


def _rows(flat: Tensor, length: int) -> list[Tensor]:
    """Return whole rows of a length of a flat tensor, and the remainder as a row; views."""
    whole = len(flat) // length * length
    rows = [flat[:whole].view(-1, length), flat[whole:].view(1, -1)]
    return [row for row in rows if row.numel()]


def _mean_where(mask: Tensor, values: Tensor) -> Tensor:
    """Return the mean of each row over the elements of a mask; 0 of none."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def _signed(pair: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what bits stand for: of each row, one of a pair of magnitudes, and a sign."""
    size = pair.to(dtype).gather(1, (bits & 1).long())
    return torch.where(bits >= 2, -size, size)


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """Return flat uint8 numbers of 2 or 4 bits in whole bytes, the first in the lowest bits."""
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % per_byte)).view(-1, per_byte)
    packed = padded[:, 0].clone()
    for place in range(1, per_byte):
        packed |= padded[:, place] << (place * bits)
    return packed


def _unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, 1).view(-1)[:numel]


def _pack_indices(indices: Tensor) -> Tensor:
    """Return flat indices below 4,096 as bytes: two in three, the first in the lowest bits."""
    return _pack(torch.stack([indices >> at & 15 for at in (0, 4, 8)], 1).byte().view(-1), 4)


def _unpack_indices(packed: Tensor, count: int) -> Tensor:
    low, middle, high = _unpack(packed, 4, 3 * count).view(-1, 3).long().unbind(1)
    return low | middle << 4 | high << 8
