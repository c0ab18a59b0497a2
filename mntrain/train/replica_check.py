"""Do all ranks hold the same weights? Compared by a hash, bit for bit."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn


@torch.no_grad()
def digest(model: nn.Module) -> str:
    """A hash of the bits of all parameters and buffers. Local; copies one tensor at a time."""
    sums = hashlib.blake2b(digest_size=16)
    for tensor in [*model.parameters(), *model.buffers()]:
        flat = tensor.detach().contiguous().view(-1).cpu()
        sums.update(flat.view(torch.uint8).numpy().data)
    return sums.hexdigest()


def odd_ranks(digests: Sequence[str]) -> list[int]:
    """The ranks whose digest is not the commonest; where two are as common, rank 0's counts."""
    counts = Counter(digests)
    commonest = max(counts, key=lambda d: (counts[d], d == digests[0]))
    return [rank for rank, theirs in enumerate(digests) if theirs != commonest]
