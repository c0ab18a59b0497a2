"""Training, and its state, whole, to compare."""

import copy
from itertools import chain, groupby

import torch
from mpi4py import MPI
from oracle import STAGES, loss_of, mine, samples, update
from torch import nn
from worlds import RANKS

from zero.collectives import gather_objects

SIZES = range(1, RANKS + 1)


class NumberOfRank(torch.optim.SGD):
    """Keeps something else on every rank, under a key that is no parameter."""

    def step(self, closure=None):
        super().step()
        self.state["rank"] = {"number": MPI.COMM_WORLD.rank}


def train(world, model, optimizer, steps):
    for step in steps:
        update(optimizer, loss_of(model, mine(world, samples(12, step, dtype_of(model)))))


def dtype_of(model):
    return next(model.parameters()).dtype


def mode_of(number):
    stage, partition = STAGES[number % len(STAGES)]
    return {"stage": stage, "partition": partition}


def saved(optimizer, model, root=0):
    """The whole state and the weights, on every rank of the launch, as from a file."""
    pieces = weights = None
    if optimizer is not None:
        pieces = gather_slices(optimizer, root)
        weights = copy.deepcopy(model.state_dict())
    return MPI.COMM_WORLD.bcast((pieces, weights), root)


def gather_slices(optimizer, root=0):
    """The whole state, a slice a parameter, on one rank; on the others nothing. Collective."""
    ranks = optimizer.sync_schedule.sharding
    everyone = gather_objects(ranks, list(optimizer.slices()))
    if ranks.rank != root:
        return []
    if not optimizer.sharded:
        return everyone[root]
    pieces = sorted(chain(*everyone), key=lambda piece: (piece.name, piece.low))
    return [joined(list(same)) for _, same in groupby(pieces, key=lambda piece: piece.name)]


def joined(pieces):
    """Adjacent slices of a parameter as one."""
    keys = pieces[0].tensors
    tensors = {key: torch.cat([piece.tensors[key] for piece in pieces]) for key in keys}
    return pieces[0]._replace(high=pieces[-1].high, tensors=tensors)


def same(ours, theirs):
    return type(ours) is type(theirs) and (
        torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    )


def assert_same_slices(ours, theirs):
    ours, theirs = ({piece.name: piece for piece in pieces} for pieces in (ours, theirs))
    assert ours.keys() == theirs.keys()
    for name, first in ours.items():
        second = theirs[name]
        assert first._replace(tensors={}, others={}) == second._replace(tensors={}, others={})
        for mine_, yours in ((first.tensors, second.tensors), (first.others, second.others)):
            assert mine_.keys() == yours.keys()
            assert all(same(value, yours[key]) for key, value in mine_.items())


def empty_like(model):
    """A model of the same kind with nothing of its weights."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    return other
