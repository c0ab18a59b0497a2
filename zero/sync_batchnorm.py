"""Batch normalization by the statistics of all ranks' samples.

    forward    gather (count, mean, sum of squared deviations) of every rank's part
    backward   sum over ranks of the gradients of the mean and the variance

Both messages are small, and wait for the slowest rank. The second is a sum of gradients of losses,
which the ranks weigh unequally in the mean, so each rank multiplies its part by its own weight.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import LazyBatchNorm1d, _BatchNorm

from zero.collectives import Collectives

CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LazyBatchNorm = LazyBatchNorm1d.__mro__[1]


@dataclass(frozen=True)
class RanksOfBatch:
    """The ranks over which layers take their statistics. Copies of a layer share it.

    `weight` returns the weight of this rank's loss in the running or coming backward, beside those
    of other ranks: 0 where it has no sample. `lacks_tokens` returns whether it has samples in the
    coming one that weigh 0.
    """

    collectives: Collectives
    weight: Callable[[], float]
    lacks_tokens: Callable[[], bool]

    def __deepcopy__(self, memo: object) -> "RanksOfBatch":
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None, which `SyncBatchNorm` refuses in training."""
        return type(None), ()


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm1d, 2d or 3d whose statistics in training are of the samples of all ranks.

    Made by `convert`. As torch's layer in one process over the whole batch, whatever the ranks'
    parts of it; in evaluation local. Forward in training is collective, and so is its backward; a
    second backward (create_graph) is refused by torch.
    """

    ranks: RanksOfBatch | None
    path: str  # within the model

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized samples. Collective in training.

        Raises ValueError for an input without channels, and on all ranks if they have one value a
        channel together; RuntimeError for a layer that was loaded with its class from a file.
        """
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        if self.ranks is None:
            raise RuntimeError(
                f"{self.path} was loaded from a file or another process, without its ranks: call "
                "world.sync_batchnorm(model)"
            )
        y: Tensor = _normalize(x, self)
        return y

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"the input has {x.dim()} dimensions: give (samples, channels, ...)")


def convert(model: nn.Module, ranks: RanksOfBatch) -> int:
    """Make every BatchNorm1d, 2d and 3d of a model a `SyncBatchNorm`, in place. Local.

    Modules, parameters, buffers and hooks stay the same objects. Returns the number of layers.
    Raises ValueError, before anything is changed, for layers of classes derived from these.
    """
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if type(module) in (*CONVERTED, SyncBatchNorm):
            found[path or "the model"] = module
        elif isinstance(module, _LazyBatchNorm):
            raise ValueError(f"{path} is a lazy BatchNorm: run a forward of the model before")
        elif isinstance(module, _BatchNorm):
            raise ValueError(
                f"{path} is a {type(module).__name__}, which may do more than a BatchNorm: use "
                "torch.nn.BatchNorm1d, BatchNorm2d or BatchNorm3d"
            )
    for path, module in found.items():
        module.__class__ = SyncBatchNorm
        assert isinstance(module, SyncBatchNorm)
        module.ranks, module.path = ranks, path
    return len(found)


def layers_below(loss: Tensor) -> tuple[list[GradientEdge], list[Tensor]]:
    """Return the last `SyncBatchNorm` layers that a loss depends on, and a zero gradient for each.

    From these, backward takes part in what is collective, whatever the loss. Local.
    """
    edges, zeros, seen = [], [], set()
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _Normalize._backward_cls):
            of_layer: Any = node
            edges.append(GradientEdge(of_layer, 0))
            zeros.append(of_layer.zero())
        else:
            left += [following for following, _ in node.next_functions]
    return edges, zeros


def _gather_statistics(
    collectives: Collectives, x: Tensor, *, refused: bool
) -> tuple[Tensor, Tensor, float]:
    """Return the mean and the biased variance of all ranks' samples, and their number. Collective.

    By channel, in fp32 or fp64, with the same bits on all. The number is NaN if any rank has
    `refused`.
    """
    channels, size = x.shape[1], collectives.size
    wide = torch.promote_types(x.dtype, torch.float32)
    own = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    count = x.numel() // channels if channels else 0
    if count:
        var, mean = torch.var_mean(x.to(wide), _others(x), correction=0)
        own = torch.cat([mean.double(), var.double() * count, own.new_tensor([count])])
    if refused:
        own[-1] = math.nan
    table = own.new_zeros(size, len(own))
    slot = collectives.slot(collectives.rank)
    table[slot] = own
    flat = table.view(-1)
    collectives.all_gather(flat).wait()
    counts, means, deviations = table[:, -1:], table[:, :channels], table[:, channels:-1]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    var = (deviations + counts * (means - mean).square()).sum(0) / total
    return mean.to(wide), var.to(wide), float(total)


def _update_running(layer: SyncBatchNorm, mean: Tensor, unbiased: Tensor) -> None:
    """Update the running statistics as torch's layers do: with the unbiased variance."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / float(layer.num_batches_tracked)
    factor = 0.0 if factor is None else factor
    for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        running.copy_((1 - factor) * running + factor * new)


@_disable_dynamo
def _normalize(x: Tensor, layer: SyncBatchNorm) -> Any:
    return _Normalize.apply(x, layer.weight, layer.bias, layer)  # type: ignore[no-untyped-call]


class _Normalize(torch.autograd.Function):
    """Normalization by statistics of the samples of all ranks. Collective in both directions.

    `mean` and `scale`, the inverse of the standard deviation, are by channel, in fp32 or fp64.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SyncBatchNorm
    ) -> Tensor:
        """Return the normalized samples, in their dtype, and update the running statistics."""
        ranks = layer.ranks
        assert ranks is not None, "the layer has checked it"
        ctx.save_for_backward(x, weight)
        ctx.zero = partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device)
        ctx.counts, ctx.loss_weight = ranks.weight() > 0, ranks.weight
        ctx.collectives = ranks.collectives.named(f"{layer.path} (SyncBatchNorm), backward")
        ctx.mean, var, ctx.values = _gather_statistics(
            ranks.collectives.named(f"{layer.path} (SyncBatchNorm), forward"),
            x if ctx.counts else x[:0],  # or the samples are a stand-in
            refused=ranks.lacks_tokens(),
        )
        if math.isnan(ctx.values):
            raise ValueError(
                f"the samples of a rank have no token, and weigh 0 by weight= of world.shard: its "
                f"loss then hides what the statistics of {layer.path} owe to them; leave weight= "
                "out, and call optimizer.backward(loss, weight=n)"
            )
        if ctx.values <= 1:
            raise ValueError(
                f"{layer.path} has {ctx.values:g} values a channel on all ranks together, and "
                "training needs more than 1"
            )
        _update_running(layer, ctx.mean, var * (ctx.values / (ctx.values - 1)))
        ctx.scale = (var + layer.eps).rsqrt()
        y = _normalized(x, ctx.mean, ctx.scale)
        if weight is not None:
            y = y * _by_channel(weight.to(y.dtype), x)
        if bias is not None:
            y = y + _by_channel(bias.to(y.dtype), x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of this rank's loss and, for `x`, of what others owe to it.

        Collective. What others owe is divided by this rank's weight, with which its gradients are
        multiplied before they are summed over ranks.
        """
        x, weight = ctx.saved_tensors
        normalized = _normalized(x, ctx.mean, ctx.scale)
        wide = gradient.to(normalized.dtype)
        of_bias = wide.sum(_others(x))
        of_weight = (wide * normalized).sum(_others(x))
        own = float(ctx.loss_weight()) if ctx.counts else 0.0
        if ctx.counts and not own:
            raise RuntimeError(
                "share(0) follows a forward in which SyncBatchNorm has counted this rank's "
                "samples: call share(0) before the forward if the rank has none, or "
                "optimizer.backward(loss, weight=0) if they have no token"
            )
        sums = torch.cat([of_bias, of_weight]).double()
        sums = sums * own if own else torch.zeros_like(sums)  # 0 * NaN is NaN
        ctx.collectives.all_reduce(sums).wait()
        of_x = torch.zeros_like(x)
        if own and ctx.needs_input_grad[0]:
            first, second = (sums / (own * ctx.values)).to(wide.dtype).chunk(2)
            wide = wide - _by_channel(first, x) - normalized * _by_channel(second, x)
            factor = ctx.scale if weight is None else ctx.scale * weight.to(wide.dtype)
            of_x = (wide * _by_channel(factor, x)).to(x.dtype)
        if weight is None:
            return of_x, None, None, None
        bias = of_bias.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return of_x, of_weight.to(weight.dtype), bias, None


def _normalized(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return (x.to(mean.dtype) - _by_channel(mean, x)) * _by_channel(scale, x)


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _others(x: Tensor) -> list[int]:
    return [dimension for dimension in range(x.dim()) if dimension != 1]
