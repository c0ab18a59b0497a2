"""A world of two as its first rank sees it, without a second one, and optimizers of one process."""

import pytest
import torch

from zero import SingleProcessCollectives, ZeroOptimizer

STAGES = pytest.mark.parametrize("stage", [0, 1, 2])


class FirstOfTwo(SingleProcessCollectives):
    """The other rank has the same model, adds zeros to every sum, and updates nothing."""

    size = 2


class OnesOfRank0(FirstOfTwo):
    """It takes ones for what rank 0 has."""

    def broadcast(self, tensor, root=0):
        return super().broadcast(tensor.fill_(1))


WORLDS = pytest.mark.parametrize("world", [SingleProcessCollectives, FirstOfTwo])


def zero(model, kind=torch.optim.SGD, /, world=SingleProcessCollectives, **options):
    """An optimizer of the parameters of a model, or of those that are given with their names."""
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else model
    return ZeroOptimizer(named, kind, world(), **options)


def assert_same_weights(mine, theirs):
    """The same bits in two models."""
    expected = theirs.state_dict()
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
