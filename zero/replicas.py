"""Make tensors the same on every rank."""

from collections.abc import Iterable

import torch
from torch import Tensor

from zero.collectives import Collectives


@torch.no_grad()
def broadcast_from_rank_0(collectives: Collectives, tensors: Iterable[Tensor]) -> None:
    """Overwrite each tensor, in place, with rank 0's. Collective; returns when all is done.

    The tensors of one dtype and device travel together, in one broadcast of a flat copy.
    """
    if collectives.size == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in by_kind.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        collectives.broadcast(flat).wait()
        parts = torch.split(flat, [tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
