"""Checksums of the bits of tensors, computed on their device.

    tensor 0      row | row | rest          the sum of all rows, column by column, x odd numbers
    tensor 1      row | rest                by column and tensor: one number of 64 bits
    the rests     row | row

Sums and products are modulo 2**64, so any order of additions gives the same. A difference in one
column always changes the checksum; of several, they cancel with a chance of about 1 in 8192.
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
            sums.append(_column_sums(data[:whole]).to(device))
        rests.append(data[whole:].to(device))
    size = sum(map(len, rests))
    if size:
        joined = torch.zeros(-(-size // ROW_BYTES) * ROW_BYTES, dtype=torch.uint8, device=device)
        torch.cat(rests, out=joined[:size])
        sums.append(_column_sums(joined))
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    odd = _odd_numbers(COLUMNS + len(sums), device)
    return (torch.stack(sums) * odd[:COLUMNS] * odd[COLUMNS:, None]).sum()


def _column_sums(data: Tensor) -> Tensor:
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64).view(-1, COLUMNS).sum(0)


@cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Return random odd numbers, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    low, high = -(2**63), 2**63 - 1
    drawn = torch.randint(low, high, (count,), generator=generator, dtype=torch.int64, device="cpu")
    return (drawn | 1).to(device)
