"""Compiled steps and steps that are thrown away, and what a rank holds.

tests/unit/zero/test_arriving.py reads parameters while they are on their way.
"""

import pytest
import torch
from models import Fickle, loss_at
from oracle import ADAMW, init, loss_of, mine, modes, samples
from torch import nn
from worlds import RANKS

from zero.gradients.slots import UnavailableGradient

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("whole", [False, True], ids=["backward", "step"])
@modes
def test_a_compiled_train_step_trains(world, pair, mode, whole):
    torch.compiler.reset()
    both = pair(**mode)

    @torch.compile(backend="eager")
    def train_step(batch):
        loss_of(both.model, batch).backward()
        if whole:
            both.optimizer.step()
            both.optimizer.zero_grad()

    for step in range(3):
        batch = samples(4 * RANKS, seed=step)
        both.alone.step(loss_of(both.alone.model, batch))
        train_step(mine(world, batch))
        if not whole:
            both.optimizer.step()
            both.optimizer.zero_grad()
    both.optimizer.wait_for_parameters()
    both.check()
    torch.compiler.reset()


# Steps that are thrown away.


@modes
def test_a_branch_of_a_thrown_away_micro_batch_counts_as_unused(world, pair, mode):
    torch.manual_seed(4)
    both = pair(Fickle().double(), **mode)
    used, unused = (1, 0), (2, 2)  # steps and ranks in which `sometimes` is used, and not
    for place in (used, unused, unused):
        with both.optimizer.no_sync():
            loss_at(both.model, mine(world, samples(12, seed=9)), *used).backward()
        both.optimizer.zero_grad()
        batch = samples(12)
        loss_at(both.alone.model, batch, *place).backward()
        loss_at(both.model, mine(world, batch), *place).backward()
        both.update()
    both.check()


# Memory.

LAYERS, WIDTH = 12, 64
LAYER = WIDTH * WIDTH * 4  # bytes
BUCKET_MB = LAYER / 2**20


def deep():
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def live(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return sum(g.nbytes for g in gradients if not isinstance(g, UnavailableGradient))


def test_at_stage_2_no_rank_ever_holds_all_gradients():
    model = deep()
    held = []
    for p in model.parameters():  # before the optimizer's own hooks
        p.register_post_accumulate_grad_hook(lambda _: held.append(live(model)))
    with init(bucket_mb=BUCKET_MB) as world:
        optimizer = world.optimizer(model, ADAMW, stage=2, overlap_forward=True)
        for turn in range(6):
            with optimizer.no_sync():
                model(torch.ones(2, WIDTH)).square().mean().backward()
            assert not live(model)
            model(torch.ones(2, WIDTH)).square().mean().backward()
            assert not live(model)
            optimizer.step()
            if turn % 2:
                optimizer.zero_grad()
            else:
                model.zero_grad()
                optimizer.zero_grad()
        memory = optimizer.memory()
    assert len(held) == 12 * LAYERS
    assert max(held) <= 2 * LAYER
    assert memory.buckets <= 3 * LAYER
    assert memory.gradients <= LAYERS * (LAYER // RANKS + 4)
