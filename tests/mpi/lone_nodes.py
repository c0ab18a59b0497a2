"""Nodes that train alone for some steps, here and in one process."""

import copy

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


class LoneNodes:
    """A replica for each node, trained with plain torch in this process.

    Subclasses `exchange` after a step, of which the first after the warm-up is number 1.
    """

    def __init__(self, model, sync, kind=ADAMW):
        self.models = [copy.deepcopy(model) for _ in range(NODES)]
        self.inner = [kind(model.parameters()) for model in self.models]
        self.sync = sync

    def step(self, step):
        taken = step - self.sync.warmup + 1
        if taken == 1:
            self.begin()
        for node, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
            batch = samples(12, step)
            if taken > 0:
                batch = tuple(column.chunk(NODES)[node] for column in batch)
            update(inner, loss_of(model, batch))
        if taken > 0:
            with torch.no_grad():
                self.exchange(taken)

    def begin(self):
        """Note the parameters before the first step after the warm-up."""
        self.exchanged = [p.detach().clone() for p in self.models[0].parameters()]
        self.momentum = [torch.zeros_like(p) for p in self.exchanged]
        self.left = [[torch.zeros_like(p) for p in self.exchanged] for _ in self.models]

    def mean(self, index):
        """The mean of a parameter over nodes."""
        return sum(list(model.parameters())[index].detach() for model in self.models) / NODES

    def send(self, node, index, change, code=None, keeps=1.0):
        """Return what a node sends of a change, and of what it has not sent before."""
        whole = change + keeps * self.left[node][index]
        sent = coded(code, whole) if code else whole
        self.left[node][index] = whole - sent
        return sent

    def after_outer_step(self, index, before, mean):
        """Exchanged parameters after a step by a mean change, of SGD with Nesterov's momentum."""
        factor = getattr(self.sync, "outer_momentum", 0.0)
        self.momentum[index] = factor * self.momentum[index] + mean
        return before - getattr(self.sync, "outer_lr", 1.0) * (mean + factor * self.momentum[index])


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


def coded(code, values):
    """Return what the code of one node's values stands for."""
    left, written = (
        values.flatten().clone(),
        torch.zeros(code.nbytes(values.numel()), dtype=torch.uint8),
    )
    total = torch.zeros_like(left)
    code.encode(left, written)
    code.decode(written, total)
    return total.view(values.shape)


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
