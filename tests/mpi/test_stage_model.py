"""A model while updated parameters are on their way, and what a rank holds.

tests/unit/zero/test_arriving.py has every way to read them.
"""

import time

import pytest
import torch
from models import Fickle, loss_at
from oracle import ADAMW, SGD, init, loss_of, mine, modes, samples
from torch import nn
from worlds import RANKS

from mntrain.comm import hierarchical
from zero.gradients.slots import UnavailableGradient

pytestmark = [pytest.mark.mpi, pytest.mark.simulated]

DELAY = 0.005  # seconds: much more than it takes to read a parameter

sharded = pytest.mark.parametrize("stage", [1, 2])


@pytest.fixture
def late(monkeypatch):
    """Let parameters arrive long after the step that made them."""
    original = hierarchical.chunked_collective

    def later(plan, ticket, access, context, lengths):
        steps = original(plan, ticket, access, context, lengths)
        yield next(steps)
        all_entered, due = next(steps), time.perf_counter() + DELAY
        gathers = ticket.signature.verb == "all_gather"
        yield lambda: not (gathers and time.perf_counter() < due) and all_entered()
        return (yield from steps)

    monkeypatch.setattr(hierarchical, "chunked_collective", later)


# Reading parameters right after a step.


class Encoder(nn.Module):
    """In evaluation, the layer hands the weights of all its parts to one function."""

    def __init__(self):
        super().__init__()
        self.spread, self.last = nn.Linear(5, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.last(self.layer(self.spread(x).view(-1, 4, 4)).flatten(1))


class Recurrent(nn.Module):
    """The recurrent layer keeps a list of its weights."""

    def __init__(self):
        super().__init__()
        self.recur, self.last = nn.LSTM(1, 6, num_layers=2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.recur(x.unsqueeze(2))[0][:, -1])


class Reparametrized(nn.Module):
    """A weight that is computed from two parameters, when it is asked for."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(5, 8))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("kind", [Encoder, Recurrent, Reparametrized])
@sharded
def test_layers_that_use_weights_in_unusual_ways_train(pair, late, stage, kind):
    torch.manual_seed(5)
    both = pair(kind().double(), SGD, stage=stage)
    both.model.eval()  # spectral_norm iterates in training, and then sees more forwards alone
    both.alone.model.eval()
    for step in range(3):
        both.train(step)
        with torch.no_grad():
            x, _ = samples(5, seed=50 + step)
            torch.testing.assert_close(both.model(x), both.alone.model(x), rtol=1e-9, atol=1e-9)
    both.check(1e-9)


@sharded
def test_a_layer_that_comes_later_waits_too(pair, late, stage):
    both = pair(stage=stage)
    both.train(0)
    for model in (both.model, both.alone.model):
        torch.manual_seed(8)
        model.append(nn.Linear(3, 3).double())
    named = [(f"4.{name}", p) for name, p in both.model[4].named_parameters()]
    both.optimizer.add_param_group({"params": named})
    both.alone.optimizer.add_param_group({"params": list(both.alone.model[4].parameters())})
    both.train(1, 2)
    again = nn.Linear(16, 3).double()  # of old parameters
    again.weight, again.bias = both.model[3].weight, both.model[3].bias
    both.model[3] = again
    both.train(3, 4, 5)
    both.check()


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


@pytest.mark.mpi(min_size=2)
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
