"""The few lines in which a script for DDP differs from one for mntrain.

A script is a function `train(kit)`, written as for DDP. Where the two differ, it calls its kit:

    kit.                          with DDP                        with mntrain
    ddp(model)                    DDP(model)                      model
    optimizer(model, SGD, lr=1)   SGD(model.parameters(), lr=1)   world.optimizer(model, SGD, lr=1)
    shard(loader)                 this rank's rows of a batch     world.shard(loader)
    no_sync(model, optimizer)     model.no_sync()                 optimizer.no_sync()

A third kit is plain torch in one process, over the whole of every batch.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero.layout import split


class PlainTorch:
    """Plain torch in this process, over whole batches."""

    rank, size = 0, 1

    def ddp(self, model, **options):
        return model

    def module(self, model):
        return model

    def optimizer(self, model, optimizer_class, *, groups=None, **options):
        trained = [p for p in model.parameters() if p.requires_grad]
        return optimizer_class(groups or trained, **options)

    def add_param_group(self, optimizer, named):
        optimizer.add_param_group({"params": [parameter for _, parameter in named]})

    def shard(self, loader):
        return loader

    def no_sync(self, model, optimizer):
        return nullcontext()

    def backward(self, optimizer, loss, weight):
        """Backward of a mean over `weight` tokens of this rank: the mean over those of all."""
        loss.backward()

    def clip_grad_norm_(self, model, optimizer, max_norm):
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def full_gradient(self, optimizer, parameter):
        return parameter.grad

    def scale_gradients_(self, model, optimizer, factor):
        for parameter in model.parameters():
            parameter.grad *= factor

    def mean(self, value, weight):
        """The mean over all ranks of values with their weights."""
        return value


class UnderDDP(PlainTorch):
    """DDP over gloo."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def ddp(self, model, **options):
        return DistributedDataParallel(model, **options)

    def module(self, model):
        return model.module

    def shard(self, loader):
        return RowsOfRank(loader, self.rank, self.size)

    def no_sync(self, model, optimizer):
        return model.no_sync()

    def backward(self, optimizer, loss, weight):
        total = torch.tensor(float(weight))
        dist.all_reduce(total)
        (loss * weight * self.size / total.item()).backward()

    def mean(self, value, weight):
        total = torch.tensor([value * weight, weight], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0] / total[1])


class Here(PlainTorch):
    """mntrain at a stage."""

    def __init__(self, world, stage):
        self.world, self.stage = world, stage
        self.rank, self.size = world.rank, world.size

    def optimizer(self, model, optimizer_class, *, groups=None, **options):
        return self.world.optimizer(
            model, optimizer_class, groups=groups, stage=self.stage, **options
        )

    def add_param_group(self, optimizer, named):
        optimizer.add_param_group({"params": named})

    def shard(self, loader):
        return self.world.shard(loader)

    def no_sync(self, model, optimizer):
        return optimizer.no_sync()

    def backward(self, optimizer, loss, weight):
        optimizer.backward(loss, weight=weight)

    def clip_grad_norm_(self, model, optimizer, max_norm):
        return optimizer.clip_grad_norm_(max_norm)

    def full_gradient(self, optimizer, parameter):
        return optimizer.full_gradient(parameter)

    def scale_gradients_(self, model, optimizer, factor):
        optimizer.scale_gradients_(factor)

    def mean(self, value, weight):
        return self.world.mean(value, weight)


class RowsOfRank:
    """An iterable over a rank's rows of every batch of a loader."""

    def __init__(self, loader, rank, size):
        self.loader, self.rank, self.size = loader, rank, size

    def __iter__(self):
        return (rows(batch, self.rank, self.size) for batch in self.loader)


def rows(batch, rank, size):
    """A rank's contiguous rows of a batch: of a tensor, or of every tensor in a container."""
    if isinstance(batch, dict):
        return {key: rows(column, rank, size) for key, column in batch.items()}
    if isinstance(batch, tuple | list) and not isinstance(batch[0], str):
        return type(batch)(rows(column, rank, size) for column in batch)
    start, stop = split(len(batch), size)[rank : rank + 2]
    return batch[start:stop]
