"""Checksums of the bits of tensors, computed on their device.

    tensor 0      row | row | rest          the sums of all rows, column by column, and of each row,
    tensor 1      row | rest                x odd numbers by column, row and tensor: 64 bits
    the rests     row | row

Sums and products are modulo 2**64, so any order of additions gives the same. A difference in one
number changes its column's sum. Numbers that changed places within a column change the sums of
their rows. Several differences cancel with a chance of about 1 in 8192 at most.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

COLUMNS = 8192  # int64 numbers of a row, each with a factor of its own
ROW_BYTES = 8 * COLUMNS


@torch.no_grad()
def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number of the bits of dense tensors: int64, 0-dim, on the device of the first.

    Reads each tensor once, and copies of it at most 64 KiB, unless it is not contiguous. Does not
    wait for the device.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    sums, rests = list[Tensor](), list[Tensor]()
    for tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = len(data) // ROW_BYTES * ROW_BYTES
        if whole:
            sums.append(_sums(data[:whole]).to(device))
        rests.append(data[whole:].to(device))
    size = sum(map(len, rests))
    if size:
        joined = torch.zeros(-(-size // ROW_BYTES) * ROW_BYTES, dtype=torch.uint8, device=device)
        torch.cat(rests, out=joined[:size])
        sums.append(_sums(joined))
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    odd = _odd_numbers(COLUMNS + 1 + len(sums), device)
    return (torch.stack(sums) * odd[: COLUMNS + 1] * odd[COLUMNS + 1 :, None]).sum()


def _sums(data: Tensor) -> Tensor:
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
