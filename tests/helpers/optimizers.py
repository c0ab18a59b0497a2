"""Optimizers by name: those that work by element, and those that need whole parameters."""

from functools import partial

import pytest
from handmade import Decaying, Lamb, Lion
from torch import optim

ELEMENTWISE = {
    "Adam": partial(optim.Adam, lr=0.01),
    "Adam amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True, maximize=True, weight_decay=0.1),
    "AdamW": partial(optim.AdamW, lr=0.05, weight_decay=0.1),
    "AdamW foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "NAdam": partial(optim.NAdam, lr=0.01, decoupled_weight_decay=True),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adagrad fused": partial(optim.Adagrad, lr=0.1, fused=True),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "ASGD": partial(optim.ASGD, lr=0.1, t0=1, lambd=0.1),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Lion": partial(Lion, lr=0.01, weight_decay=0.1),
    "Decaying": partial(Decaying, lr=0.3),
}
BY_PARAMETER = {
    "Muon": partial(optim.Muon, lr=0.02),  # takes matrices only
    "Adafactor": partial(optim.Adafactor, lr=0.05),
    "Lamb": partial(Lamb, lr=0.01),
}
QUICK = {"Adam amsgrad", "AdamW fused", "Adagrad", "SGD nesterov", "Lion", *BY_PARAMETER}


def marks_of(name):
    """The quick set leaves out most of those that work by element."""
    return [pytest.mark.thorough] if name in ELEMENTWISE.keys() - QUICK else []


def each(names):
    """A case for each of some optimizers."""
    return [pytest.param(name, marks=marks_of(name)) for name in names]
