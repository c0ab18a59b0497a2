"""Checks of a model that is to be trained on several ranks."""

import sys

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def check_plain(model: nn.Module, size: int) -> None:
    """Raise ValueError for a model that other code distributes, or whose forward differs by rank.

    As a whole or in part. Local; `size` is the number of ranks.
    """
    fsdp, tensor = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
    shards = tuple(getattr(fsdp, n, ()) for n in ("FullyShardedDataParallel", "FSDPModule"))
    dtensor = getattr(tensor, "DTensor", ())
    embeddings = nn.Embedding | nn.EmbeddingBag
    for path, module in model.named_modules():
        which, kind = f"model.{path}" if path else "model", type(module).__name__
        of_parts = (isinstance(p, dtensor) for p in module.parameters(recurse=False))
        problem = ""
        if isinstance(module, DistributedDataParallel | DataParallel):
            problem = (
                f"wrapped in {kind}: give the module inside, its .module; the optimizer averages "
                "the gradients"
            )
        elif isinstance(module, shards) or any(of_parts):
            problem = (
                "sharded by torch.distributed: leave fully_shard and the like out, and give the "
                "plain module with stage=1 or 2, which shards optimizer state and gradients"
            )
        elif size > 1 and isinstance(module, embeddings) and module.max_norm is not None:
            problem = (
                f"of type {kind} with max_norm, which changes its weight in forward by the samples "
                "of each rank alone: leave it out, and limit the norms of all rows after "
                "optimizer.step()"
            )
        if problem:
            raise ValueError(f"{which} is {problem}")
