"""Sharded torch optimizers, each of which equals itself in one process."""

from functools import partial

import pytest
import torch
from optimizers import BY_PARAMETER, ELEMENTWISE, each
from torch import nn

from mntrain.optim import Muon

pytestmark = pytest.mark.mpi

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
    both = pair(matrices(), WHOLE[name], stage=stage, partition="parameter")
    both.train(*range(4))
    both.check(TOLERANCES.get(name, 1e-9))
