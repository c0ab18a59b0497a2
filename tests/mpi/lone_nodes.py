"""Nodes that train alone for some steps."""

import torch
from model_digest import model_digest
from models import net
from mpi4py import MPI
from oracle import ADAMW, init, loss_of, make_optimizers, mine, samples, update
from worlds import RANKS

RANK = MPI.COMM_WORLD.rank
PER_NODE = 2 if RANKS == 4 else 1
NODES = RANKS // PER_NODE
NODE = RANK // PER_NODE


def keep_world():
    """Yield a world of some nodes, for a fixture."""
    with init(ranks_per_node=PER_NODE) as world:
        yield world


def keep_optimizers(world, kind=ADAMW, *, whole=False, **usual):
    """Yield a function that makes optimizers, which are closed at the end, for a fixture.

    With `whole`, stages 1 and 2 have whole parameters, whose codes are the same at all stages.
    """
    kept = make_optimizers(world)
    make = next(kept)

    def make_at(model, kind=kind, *, stage=0, **options):
        partition = {"partition": "parameter"} if whole and stage else {}
        return make(model, kind, **{"stage": stage, **usual, **partition, **options})

    yield make_at
    next(kept, None)


def take_step(world, model, optimizer, step):
    dtype = next(model.parameters()).dtype
    update(optimizer, loss_of(model, mine(world, samples(12, step, dtype))))


def take_steps(world, model, optimizer, steps):
    for step in steps:
        take_step(world, model, optimizer, step)


def digests(world, model):
    return world.gather(model_digest(model))


def run(world, folder, stage, sync, steps, *, every=0, now=None):
    """Continue the run in a folder, or begin it; return its model, after `steps` steps.

    Nodes weigh unlike, and otherwise in each step.
    """
    model = net(torch.bfloat16 if stage == 1 else torch.float64)  # with master weights at stage 1
    optimizer = world.optimizer(model, ADAMW, stage=stage, sync=sync)
    checkpoints = world.checkpoints(folder, model=model, optimizer=optimizer, every=every)
    for step in range(checkpoints.restore() + 1, steps + 1):
        optimizer.share(1 + (NODE + step) % 3)
        take_step(world, model, optimizer, step)
        checkpoints.save(step, now=step == now)
    checkpoints.close()
    optimizer.wait_for_parameters()
    return model, optimizer
