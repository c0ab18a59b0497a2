"""The BatchNorm layers of a world that normalize by the samples of all ranks."""

from collections.abc import Iterator, Sequence

from torch import nn

from mntrain.alike.values import compare
from mntrain.ranks import Ranks
from zero.optimizer import ZeroOptimizer
from zero.sync_batchnorm import RanksOfBatch, SyncBatchNorm, convert


def convert_batch_norms(
    world: Ranks, optimizers: Sequence[ZeroOptimizer], model: nn.Module, number: int
) -> nn.Module:
    """Convert the layers of a model. Collective. See `World.sync_batchnorm`.

    The world's `optimizers` weigh their losses. `number` is that of the call.
    """
    parameters = set(map(id, model.parameters())) if isinstance(model, nn.Module) else set()
    stream = world.collectives.add_stream(f"sync_batchnorm {number}")
    stream = stream.replace(choice=stream.choice.among_others())

    def training() -> Iterator[ZeroOptimizer]:
        for optimizer in optimizers:
            trained = (p for g in optimizer.param_groups for p in g["params"])
            if not optimizer.closed and any(id(p) in parameters for p in trained):
                yield optimizer

    def weight() -> float:
        weights = {optimizer.accumulation.loss_weight for optimizer in training()}
        if len(weights) > 1:
            raise RuntimeError(
                f"the optimizers of a model with world.sync_batchnorm weigh this rank's loss "
                f"by {' and '.join(f'{weight:g}' for weight in sorted(weights))}: call share() "
                "of each alike, and loss.backward()"
            )
        return weights.pop() if weights else 1.0

    def lacks_tokens() -> bool:
        return any(optimizer.accumulation.weight.lacks_tokens for optimizer in training())

    with world.agreement():
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is of type {type(model).__name__}: give a torch.nn.Module")
        if not convert(model, RanksOfBatch(stream, weight, lacks_tokens)):
            raise ValueError(
                "the model has no torch.nn.BatchNorm1d, BatchNorm2d or BatchNorm3d: leave "
                "world.sync_batchnorm out"
            )
    layers = [m.path for m in model.modules() if isinstance(m, SyncBatchNorm)]
    compare(world, {"the BatchNorm layers": layers}, "give the same model")
    return model
