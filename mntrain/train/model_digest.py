"""Comparison of the replicas of a model: hashes of their bits."""

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from mntrain.errors import TrainingStoppedError
from mntrain.ranks import Ranks


@torch.no_grad()
def model_digest(model: nn.Module) -> str:
    """Return a hash of the bits of all parameters and buffers. Local; copies a tensor at a time."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in [*model.parameters(), *model.buffers()]:
        flat = tensor.detach().contiguous().view(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def differing_ranks(
    digests: Sequence[str], groups: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """Return the ranks whose digest is not the most common one of their group. Pure.

    `digests` is by rank; `groups` are by default one of all ranks. If two digests are equally
    common, that of the group's first rank counts as right.
    """
    differing = []
    for group in groups or [range(len(digests))]:
        counts = Counter(digests[rank] for rank in group)
        expected = max(counts, key=lambda d: (counts[d], d == digests[group[0]]))
        differing += [rank for rank in group if digests[rank] != expected]
    return sorted(differing)


def compare_replicas(
    world: Ranks, model: nn.Module, groups: Sequence[Sequence[int]] | None, step: int
) -> None:
    """Raise TrainingStoppedError if ranks of a group, by default all, do not agree. Collective."""
    if ranks := differing_ranks(world.gather(model_digest(model)), groups):
        raise TrainingStoppedError(
            f"after step {step}, the weights differ between ranks: "
            f"rank {', '.join(map(str, ranks))} against the others",
            world.rank,
        )
