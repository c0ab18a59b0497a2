"""Which torch optimizers can be sharded, and how: each equals itself in one process."""

from functools import partial

import pytest
import torch
from handmade import Decaying, Lamb, Lion
from torch import nn

from mntrain.optim import Muon

pytestmark = pytest.mark.mpi

ELEMENTWISE = {
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "Adam amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "SGD nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Lion": partial(Lion, lr=0.01, weight_decay=0.1),
    "Decaying": partial(Decaying, lr=0.3),
}
BY_PARAMETER = {
    "Muon": partial(torch.optim.Muon, lr=0.02),
    "Muon of mntrain": partial(Muon, lr=0.02),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "Lamb": partial(Lamb, lr=0.05),
}
# Muon computes in bf16 or fp32, whatever the dtype: the order of a sum may show there.
TOLERANCES = {"Muon": 1e-2, "Muon of mntrain": 1e-5}


# tests/unit/zero/test_trials.py tries every one of them.
QUICK = ("Adam amsgrad", "AdamW fused", "Adagrad", "SGD nesterov", "Lion")


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.thorough]) for n in ELEMENTWISE],
)
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
@pytest.mark.parametrize("name", BY_PARAMETER)
def test_optimizers_that_work_by_parameter_equal_torch(pair, name, stage):
    both = pair(matrices(), BY_PARAMETER[name], stage=stage, partition="parameter")
    both.train(*range(4))
    both.check(TOLERANCES.get(name, 1e-9))
