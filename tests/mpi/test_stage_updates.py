"""Sharded torch optimizers, each of which equals itself in one process."""

from functools import partial

import pytest
import torch
from handmade import Lamb
from models import net
from optimizers import BY_PARAMETER, ELEMENTWISE, each
from oracle import EXACT, PlainTraining, assert_close, loss_of, mine, modes, samples, update
from torch import nn
from worlds import RANKS, refusal

from mntrain.optim import Muon

pytestmark = pytest.mark.simulated


class ScaledByNorm(torch.optim.SGD):
    """Scales the gradient of each parameter by its norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.grad.div_(p.grad.norm())
        return super().step(closure)


WHOLE = BY_PARAMETER | {
    "derived": partial(ScaledByNorm, lr=0.1),
    "Muon of mntrain": partial(Muon, lr=0.02),
    "function": lambda params: Lamb(params, lr=0.01),
}
# Muon computes in bf16 or fp32, whatever the dtype: the order of a sum may show there.
TOLERANCES = {"Muon": 1e-2, "Muon of mntrain": 1e-5}


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize("name", each(ELEMENTWISE))
def test_optimizers_that_work_by_element_equal_torch_at_stage_2(pair, name, partition):
    both = pair(kind=ELEMENTWISE[name], stage=2, partition=partition)
    both.train(*range(4))
    both.check()


def matrices():
    """A model of matrices only, as Muon wants them; more and fewer than there are ranks."""
    torch.manual_seed(6)
    first, *others = (nn.Linear(m, n, bias=False) for m, n in ((5, 12), (12, 4), (4, 3)))
    return nn.Sequential(first, nn.Tanh(), *others).double()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_work_by_parameter_equal_torch(pair, name, stage):
    both = pair(matrices(), WHOLE[name], stage=stage)
    both.train(*range(4))
    both.check(TOLERANCES.get(name, 1e-9))


class Lookahead(torch.optim.SGD):
    """Goes half the way between copies that it made of the parameters and a step from them.

    Source: Zhang et al., "Lookahead Optimizer: k steps forward, 1 step back", arXiv 1907.08610.
    """

    def __init__(self, params, lr=0.2):
        super().__init__(params, lr=lr)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, kept in zip(group["params"], slow, strict=True):
                p.copy_(kept.lerp_(p, 0.5))


def net_of(rank, dtype):
    """A model whose values differ between ranks."""
    model = net(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.bfloat16, 0.02)])
@modes
def test_copies_of_the_parameters_are_of_rank_0s(world, make, mode, dtype, tolerance):
    model, alone = net_of(world.rank, dtype), PlainTraining(net(dtype).double(), Lookahead)
    optimizer = make(model, Lookahead, **mode)
    for step in range(3):
        batch = samples(12, step, dtype)
        update(optimizer, loss_of(model, mine(world, batch)))
        alone.step(loss_of(alone.model, (batch[0].double(), batch[1])))
    optimizer.close()
    assert_close(model.double(), alone.model, tolerance)


def test_functions_that_make_optimizers_of_unlike_classes_are_refused(world):
    unlike = torch.optim.SGD if world.rank else torch.optim.RMSprop
    said = refusal(world.optimizer, net(), lambda params: unlike(params, lr=0.1))
    assert "the class of the optimizer" in said
    assert "SGD" in said
    assert "RMSprop" in said


class RefusedOnOne(torch.optim.SGD):
    """Cannot be made on the last rank."""

    rank = 0

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        if self.rank == RANKS - 1:
            raise ValueError("not here")


def test_an_optimizer_that_cannot_be_made_on_one_rank_is_refused_on_all(world, pair, monkeypatch):
    monkeypatch.setattr(RefusedOnOne, "rank", world.rank)
    assert "not here" in refusal(world.optimizer, net(), RefusedOnOne)
    both = pair()
    both.train(0)
    both.check()
