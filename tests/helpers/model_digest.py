"""Hashes of the bits of models, to compare replicas in tests."""

import hashlib

import torch

from mntrain.alike.naming import odd_ranks


@torch.no_grad()
def model_digest(model):
    """A hash of the bits of all parameters and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in [*model.parameters(), *model.buffers()]:
        flat = tensor.detach().contiguous().view(-1).cpu()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def differing_ranks(digests, groups):
    """The ranks whose digest is not the most common one of their group; `digests` are by rank."""
    return sorted(r for group in groups for r in odd_ranks({r: digests[r] for r in group}))
