"""Training on the GPU gives the weights of plain torch on the CPU, in one process.

Every rank trains the oracle too. In fp64 the two devices differ by roundings, far below what a
wrong weight of a sample, or a gradient that came too late, would do.
"""

import copy
from functools import partial
from itertools import cycle, product

import pytest
import torch
from models import Fickle, Mixed, Strided, Tied, TiedTokenModel, WithEmpty, loss_at, net
from oracle import (
    ADAMW,
    MAX_NORM,
    OWN,
    SGD,
    SHARED,
    STAGES,
    PlainTraining,
    assert_parity,
    loss_of,
    mine,
    rows,
    samples,
    update,
)
from worlds import RANKS

from gpu.place import CUDA, gpu
from gpu.ranks.transports import TRANSPORTS, transports

pytestmark = [pytest.mark.mpi, *gpu]

STEPS = 3
CLOSE = 1e-9  # in fp64, relative and absolute
FUSED = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True)


def double(kind):
    torch.manual_seed(4)
    return kind().double()


MODELS = {
    "net": net,
    "unused": partial(double, Fickle),
    "tied": partial(double, Tied),
    "empty": partial(double, WithEmpty),
    "strided": partial(double, Strided),
    "mixed": partial(Mixed, torch.float64, torch.float32),
}
WORLDS = [("lanes", 2, SHARED), ("leader", 2, OWN), ("lanes", None, OWN), ("flat", 2, SHARED)]
OPTIMIZERS = {"AdamW": (ADAMW, ADAMW), "fused": (FUSED, ADAMW), "SGD": (SGD, SGD)}


def grid():
    """Every model at every stage by every transport; the other choices take turns."""
    kinds = [*OPTIMIZERS, "fused", "AdamW"]  # five, so that every model has every one
    others = zip(cycle(WORLDS), cycle([1, 2, 2, 1, 2, 1, 2]), cycle(kinds), strict=False)
    for row, other in zip(product(TRANSPORTS, STAGES, MODELS), others, strict=False):
        transport, (stage, partition), name = row
        yield pytest.param((*row, *other), id=f"{transport}-{stage}-{partition}-{name}")


def to(device, batch):
    return tuple(column.to(device) for column in batch)


def parts_of(batch, micro_batches):
    """Every rank's equal share of a batch, in micro-batches of unequal sizes."""
    shares = zip(*(column.chunk(RANKS) for column in batch), strict=True)
    cuts = [(0, None)] if micro_batches == 1 else [(0, 1), (1, None)]
    return [[rows(share, *cut) for cut in cuts] for share in shares]


def assert_parity_of_devices(world, model, alone, tolerance):
    """Do as `assert_parity`, for a model on the GPU."""
    twin = copy.deepcopy(alone.model)
    twin.load_state_dict(model.state_dict())
    assert_parity(world, twin, alone, tolerance)


@pytest.mark.parametrize("row", list(grid()))
def test_every_stage_equals_one_process_on_the_cpu(worlds, row):
    transport, (stage, partition), name, where, micro_batches, kind = row
    model, (ours, theirs) = MODELS[name](), OPTIMIZERS[kind]
    alone = PlainTraining(model, theirs, MAX_NORM)
    tolerance = 3e-6 if name == "mixed" else CLOSE
    world = worlds(transport, *where)
    model.to(world.device)
    optimizer = world.optimizer(
        model, ours, stage=stage, partition=partition, max_grad_norm=MAX_NORM
    )
    for step in range(STEPS):
        parts = parts_of(samples(12, seed=step), micro_batches)
        norm = alone.step(
            sum(
                loss_at(alone.model, part, step, rank) * len(part[1]) / 12
                for rank, share in enumerate(parts)
                for part in share
            )
        )
        *others, last = parts[world.rank]
        for part in others:
            with optimizer.no_sync():
                loss = loss_at(model, to(world.device, part), step, world.rank)
                optimizer.backward(loss, len(part[1]))
        loss = loss_at(model, to(world.device, last), step, world.rank)
        optimizer.backward(loss, len(last[1]))
        result = optimizer.step()
        optimizer.zero_grad()
        assert result.weight == 12
        assert result.grad_norm == pytest.approx(norm, rel=10 * tolerance)
        assert result.clip_coef < 1
    optimizer.close()
    assert_parity_of_devices(world, model, alone, tolerance)


@transports
def test_with_one_micro_batch_all_stages_give_the_same_bits(worlds, transport):
    world = worlds(transport)
    found = []
    for stage in (0, 1, 2, 0):
        model = net(torch.float32).to(world.device)
        optimizer = world.optimizer(model, ADAMW, stage=stage, max_grad_norm=MAX_NORM)
        for step in range(STEPS):
            batch = mine(world, samples(12, step, torch.float32))
            update(optimizer, loss_of(model, to(world.device, batch)))
        optimizer.close()
        found.append(list(model.state_dict().values()))
    first, one, two, again = found
    assert all(map(torch.equal, first, again))
    assert all(map(torch.equal, one, two))
    # Stage 0 leaves parameters where they were: a GPU may take another kernel for another address.
    same = partial(torch.allclose, rtol=1e-3, atol=1e-5) if CUDA else torch.equal
    assert all(map(same, first, one))


@transports
def test_a_language_model_trained_on_a_loader_of_unequal_shares(worlds, transport):
    torch.manual_seed(5)
    model = TiedTokenModel().double()
    alone = PlainTraining(model, ADAMW)
    generator = torch.Generator().manual_seed(6)
    tokens = [torch.randint(11, (n, 2), generator=generator) for n in (9, 4, 3)]
    world = worlds(transport)
    model.to(world.device)
    optimizer = world.optimizer(model, ADAMW, stage=1)
    for batch, whole in zip(world.shard(tokens), tokens, strict=True):
        alone.step(loss_of(alone.model, whole.unbind(1)))
        update(optimizer, loss_of(model, to(world.device, batch.unbind(1))))
    optimizer.close()
    assert_parity_of_devices(world, model, alone, CLOSE)
