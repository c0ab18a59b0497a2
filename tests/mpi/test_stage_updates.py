"""Sharded torch optimizers, each of which equals itself in one process."""

import itertools
from functools import partial

import pytest
import torch
from handmade import Late, Projected
from optimizers import BY_PARAMETER, ELEMENTWISE, each
from oracle import modes
from torch import nn

from mntrain.optim import Muon

pytestmark = [pytest.mark.mpi, pytest.mark.simulated]

WHOLE = BY_PARAMETER | {"Muon of mntrain": partial(Muon, lr=0.02)}
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


class ScaledByNorm(torch.optim.AdamW):
    """Scales the gradient of each parameter by its norm, in later steps."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and self.state[p].get("step", 0) >= 7:
                    p.grad.div_(p.grad.norm())
        return super().step()


def hooked(params):
    """An optimizer of torch, by a function, whose gradients a hook changes from a step on."""
    optimizer, steps = torch.optim.SGD(params, lr=0.1), itertools.count()

    @torch.no_grad()
    def normalize(optimizer, args, kwargs):
        late = next(steps) >= 7
        for group in optimizer.param_groups if late else ():
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sub_(p.grad.mean())

    optimizer.register_step_pre_hook(normalize)
    return optimizer


LATE = {
    "Late": partial(Late, start=7),
    "Projected": Projected,
    "ScaledByNorm": ScaledByNorm,
    "hook": hooked,
}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", LATE)
def test_optimizers_that_need_whole_tensors_in_later_steps_equal_torch(pair, name, stage):
    both = pair(matrices(), LATE[name], stage=stage)
    both.train(*range(12))
    both.check(1e-9)


class ByAttribute(torch.optim.SGD):
    """Multiplies the learning rate by a number that a parameter may have."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * getattr(p, "lr_mult", 1.0))


@modes
def test_an_optimizer_reads_attributes_of_the_parameters(pair, mode):
    both = pair(kind=partial(ByAttribute, lr=0.2), **mode)
    for factors in ({0: 0.0, 3: 5.0}, {0: 2.0}):
        for place, factor in factors.items():
            for model in (both.model, both.alone.model):
                model[place].weight.lr_mult = factor
        both.train(0, 1)
    both.check()
