"""What a model's user sees while updated parameters are on their way, and what a rank holds."""

import copy
import io
import pickle
import time

import pytest
import torch
from models import Fickle, Tied, loss_at, net
from mpi4py import MPI
from oracle import (
    ADAMW,
    SGD,
    Alone,
    assert_parity,
    init,
    loss_of,
    mine,
    modes,
    samples,
    train,
)
from torch import nn
from torch.nn import functional
from worlds import RANKS, refusal

from mntrain.comm import hierarchical
from mntrain.train.model_digest import model_digest
from zero.gradients.stages import UnavailableGradient

pytestmark = pytest.mark.mpi

RANK = MPI.COMM_WORLD.rank
DELAY = 0.005  # seconds: much more than it takes to read a parameter

sharded = pytest.mark.parametrize("stage", [1, 2])


@pytest.fixture
def late(monkeypatch):
    """Let parameters arrive long after the step that made them."""
    original = hierarchical.chunked_collective

    def later(plan, ticket, access, context):
        steps = original(plan, ticket, access, context)
        yield next(steps)
        all_entered, due = next(steps), time.perf_counter() + DELAY
        gathers = ticket.signature.verb == "all_gather"
        yield lambda: not (gathers and time.perf_counter() < due) and all_entered()
        return (yield from steps)

    monkeypatch.setattr(hierarchical, "chunked_collective", later)


# Reading parameters right after a step.


def stored(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return list(torch.load(file).values())


def asked_twice(model):
    parameters = model[3]._parameters
    return [parameters["weight"], parameters["bias"]]


def applied(model):
    seen = []
    model.apply(lambda module: seen.extend(module.parameters(recurse=False)))
    return seen


READERS = {
    "attribute": lambda model: [model[3].weight, model[0].bias],
    "get_parameter": lambda model: [model.get_parameter("2.weight")],
    "parameters": lambda model: list(model.parameters()),
    "named_parameters": lambda model: [p for _, p in model.named_parameters()],
    "state_dict": lambda model: list(model.state_dict().values()),
    "of a part": lambda model: list(model[3].state_dict().values()),
    "save": stored,
    "apply": applied,
    "vector": lambda model: [nn.utils.parameters_to_vector(model.parameters())],
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "dictionary": asked_twice,
    "copy": lambda model: [copy.copy(model[0]).weight, model[0].bias, copy.copy(model[3]).bias],
    "pickle": lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
    "forward": lambda model: [model(samples(4)[0])],
    "forward of a part": lambda model: [model[:2](samples(4)[0])],
    "functional_call": lambda model: [
        torch.func.functional_call(model, {"0.bias": torch.zeros(16).double()}, samples(4)[0])
    ],
}


@pytest.mark.thorough
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@sharded
def test_what_is_read_through_the_model_after_a_step_is_new(world, make, late, stage, reader):
    model = net()
    alone = Alone(model, ADAMW)
    optimizer = make(model, ADAMW, stage=stage)
    for step in range(2):
        batch = samples(12, seed=step)
        alone.step(loss_of(alone.model, batch))
        loss_of(model, mine(world, batch)).backward()
        optimizer.step()
        read = [tensor.detach().clone() for tensor in reader(model)]
        torch.testing.assert_close(read, reader(alone.model), rtol=1e-10, atol=1e-10)
        optimizer.zero_grad()
    assert_parity(world, model, alone)


@sharded
def test_who_kept_parameters_can_wait_for_them(world, make, late, stage):
    model = net()
    alone = Alone(model, ADAMW)
    optimizer = make(model, ADAMW, stage=stage)
    kept = list(model.parameters())
    batch = samples(12)
    alone.step(loss_of(alone.model, batch))
    loss_of(model, mine(world, batch)).backward()
    optimizer.step()
    optimizer.wait_for_parameters()
    torch.testing.assert_close(kept, list(alone.model.parameters()), rtol=1e-10, atol=1e-10)


class Attention(nn.Module):
    """The attention's output layer is never called: its weights are read by the attention."""

    def __init__(self):
        super().__init__()
        self.spread, self.last = nn.Linear(5, 16), nn.Linear(16, 3)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        rows = self.spread(x).view(-1, 4, 4)
        return self.last(self.attend(rows, rows, rows)[0].flatten(1))


class Encoder(nn.Module):
    """In evaluation, the layer hands the weights of all its parts to one function."""

    def __init__(self):
        super().__init__()
        self.spread, self.last = nn.Linear(5, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.last(self.layer(self.spread(x).view(-1, 4, 4)).flatten(1))


class Keeping(nn.Module):
    """Reads its own parameters by references that it keeps."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3))
        self.kept = [self.weight, self.bias]

    def double(self):
        for p in self.kept:
            p.data = p.data.double()
        return self

    def forward(self, x):
        return functional.linear(x, *self.kept)


class Recurrent(nn.Module):
    """The recurrent layer keeps a list of its weights."""

    def __init__(self):
        super().__init__()
        self.recur, self.last = nn.LSTM(1, 6, num_layers=2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.recur(x.unsqueeze(2))[0][:, -1])


class Normed(nn.Module):
    """A weight that is computed from two parameters, when it is asked for."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(5, 8))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Borrowing(nn.Module):
    """Uses the weight of a layer that it never calls."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(functional.linear(x, self.first.weight, self.first.bias)))


@pytest.mark.parametrize("kind", [Attention, Encoder, Keeping, Recurrent, Normed, Borrowing, Tied])
@sharded
def test_layers_that_use_weights_in_unusual_ways_train(world, make, late, stage, kind):
    torch.manual_seed(5)
    model = kind().double()
    alone = Alone(model, SGD)
    optimizer = make(model, SGD, stage=stage)
    model.eval()  # spectral_norm iterates in training, and then sees more forwards alone
    alone.model.eval()
    for step in range(3):
        train(world, model, optimizer, alone, [step])
        with torch.no_grad():
            x, _ = samples(5, seed=50 + step)
            torch.testing.assert_close(model(x), alone.model(x), rtol=1e-9, atol=1e-9)
    assert_parity(world, model, alone, 1e-9)


@sharded
def test_a_copy_of_the_model_is_nobodys_but_the_copiers(world, make, late, stage):
    model = net()
    alone = Alone(model, ADAMW)
    optimizer = make(model, ADAMW, stage=stage)
    train(world, model, optimizer, alone, [0])
    copied = copy.deepcopy(model)
    before = model_digest(copied)
    train(world, model, optimizer, alone, [1])
    assert model_digest(copied) == before
    copied.load_state_dict(model.state_dict())
    assert model_digest(copied) == model_digest(model)
    if RANK == 0:  # no collective hides in it
        loss_of(copied, samples(3)).backward()
        torch.optim.SGD(copied.parameters(), 0.1).step()
    train(world, model, optimizer, alone, [2])
    assert_parity(world, model, alone)


@sharded
def test_an_averaged_model_follows(world, make, late, stage):
    model = net()
    alone = Alone(model, ADAMW)
    optimizer = make(model, ADAMW, stage=stage)
    averages = [torch.optim.swa_utils.AveragedModel(each) for each in (model, alone.model)]
    for step in range(3):
        batch = samples(12, seed=step)
        alone.step(loss_of(alone.model, batch))
        loss_of(model, mine(world, batch)).backward()
        optimizer.step()
        averages[0].update_parameters(model)
        averages[1].update_parameters(alone.model)
        optimizer.zero_grad()
    for ours, theirs in zip(*(average.parameters() for average in averages), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@sharded
def test_a_layer_that_comes_later_waits_too(world, make, late, stage):
    model = net()
    alone = Alone(model, ADAMW)
    optimizer = make(model, ADAMW, stage=stage)
    train(world, model, optimizer, alone, [0])
    for each in (model, alone.model):
        torch.manual_seed(8)
        each.append(nn.Linear(3, 3).double())
    optimizer.add_param_group({"params": [(f"4.{n}", p) for n, p in model[4].named_parameters()]})
    alone.optimizer.add_param_group({"params": list(alone.model[4].parameters())})
    train(world, model, optimizer, alone, [1, 2])
    assert_parity(world, model, alone)


@sharded
def test_a_layer_that_is_made_later_of_old_parameters_waits_too(world, make, late, stage):
    model = net()
    alone = Alone(model, ADAMW)
    optimizer = make(model, ADAMW, stage=stage)
    train(world, model, optimizer, alone, [0])
    again = nn.Linear(16, 3).double()
    again.weight, again.bias = model[3].weight, model[3].bias
    model[3] = again
    train(world, model, optimizer, alone, [1, 2, 3])
    assert_parity(world, model, alone)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in its compiler
@pytest.mark.parametrize(
    ("stage", "warm"), [pytest.param(1, False, marks=pytest.mark.thorough), (2, True)]
)
def test_a_compiled_model_trains(world, make, late, stage, warm):
    torch.compiler.reset()
    model = net()
    alone = Alone(model, ADAMW)
    compiled = torch.compile(model, backend="eager")
    if warm:  # before there is anything to wait for
        loss_of(compiled, samples(4)).backward()
        model.zero_grad()
    optimizer = make(model, ADAMW, stage=stage)
    for step in range(3):
        batch = samples(4 * RANKS, seed=step)
        alone.step(loss_of(alone.model, batch))
        loss_of(compiled, mine(world, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_parity(world, model, alone)


@pytest.mark.parametrize("whole", [False, True], ids=["backward", "step"])
@modes
def test_a_compiled_train_step_trains(world, make, mode, whole):
    torch.compiler.reset()
    model = net()
    alone = Alone(model, ADAMW)
    optimizer = make(model, ADAMW, **mode)

    @torch.compile(backend="eager")
    def train_step(batch):
        loss_of(model, batch).backward()
        if whole:
            optimizer.step()
            optimizer.zero_grad()

    for step in range(3):
        batch = samples(4 * RANKS, seed=step)
        alone.step(loss_of(alone.model, batch))
        train_step(mine(world, batch))
        if not whole:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.wait_for_parameters()
    assert_parity(world, model, alone)
    torch.compiler.reset()


# What a refused or closed optimizer leaves.


@modes
def test_a_refused_optimizer_leaves_no_hooks(world, make, mode):
    model = net()
    alone = Alone(model, SGD)
    said = refusal(world.optimizer, model, torch.optim.SGD, **mode, lr=-1.0)
    assert "Invalid learning rate" in said
    optimizer = make(model, SGD, **mode)
    train(world, model, optimizer, alone, range(2))
    assert_parity(world, model, alone)


@modes
def test_a_closed_optimizer_gives_the_model_back(world, late, mode):
    model = net()
    alone = Alone(model, ADAMW)
    for turn in range(2):
        optimizer = world.optimizer(model, ADAMW, **mode, overlap_forward=True)
        train(world, model, optimizer, alone, [turn])
        optimizer.close()
        alone.optimizer = ADAMW(alone.model.parameters())
    assert_parity(world, model, alone)
    if RANK == 0:  # plain torch, on one rank alone
        plain = ADAMW(model.parameters())
        loss_of(model, samples(12)).backward()
        plain.step()


@pytest.mark.thorough
@modes
def test_a_model_may_change_its_stage(world, mode):
    model = net()
    alone = Alone(model, SGD)
    for stage in (2, 0, mode["stage"], 1):
        optimizer = world.optimizer(model, SGD, stage=stage, overlap_forward=True)
        train(world, model, optimizer, alone, range(2))
        optimizer.close()
        alone.optimizer = SGD(alone.model.parameters())
    assert_parity(world, model, alone)


# Buffers, and steps that are thrown away.


@modes
def test_buffers_are_those_of_rank_0_after_a_skipped_step_as_well(world, make, mode):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    optimizer = make(model, SGD, **mode, non_finite="skip")
    for factor in (1.0, float("inf")):
        batch = samples(5, seed=RANK)
        (factor * loss_of(model, batch)).backward()
        statistics = world.gather([b.tolist() for b in model.buffers()])
        optimizer.step()
        optimizer.zero_grad()
        assert [b.tolist() for b in model.buffers()] == statistics[0]


@modes
def test_a_branch_of_a_thrown_away_micro_batch_counts_as_unused(world, make, mode):
    torch.manual_seed(4)
    model = Fickle().double()
    alone = Alone(model, ADAMW)
    optimizer = make(model, ADAMW, **mode)
    used, unused = (1, 0), (2, 2)  # steps and ranks in which `sometimes` is used, and not
    for place in (used, unused, unused):
        with optimizer.no_sync():
            loss_at(model, mine(world, samples(12, seed=9)), *used).backward()
        optimizer.zero_grad()
        batch = samples(12)
        alone.step(loss_at(alone.model, batch, *place))
        loss_at(model, mine(world, batch), *place).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_parity(world, model, alone)


# Memory.

LAYERS, WIDTH = 12, 64
LAYER = WIDTH * WIDTH * 4  # bytes
BUCKET_MB = LAYER / 2**20


def deep(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).to(dtype)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@modes
def test_memory_is_what_the_stage_keeps(mode, dtype):
    model = deep(dtype)
    total = LAYERS * LAYER * dtype.itemsize // 4
    with init(bucket_mb=BUCKET_MB) as world:
        optimizer = world.optimizer(model, ADAMW, **mode, overlap_forward=True)
        for _ in range(2):
            model(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        everyone = world.gather(optimizer.memory())
        expected = optimizer.expected_memory()
    memory = everyone[world.rank]
    assert memory.parameters == total
    # Moments in fp32, and a step count for each parameter, in shards that may be uneven by layers.
    parts = 1 if mode["stage"] == 0 else RANKS
    exact = 2 * LAYERS * LAYER
    assert sum(each.state for each in everyone) >= exact * RANKS // parts
    assert memory.state <= exact // parts + 4 * LAYERS + 2 * LAYER
    masters = 0 if dtype == torch.float32 else LAYERS * LAYER // parts
    assert abs(memory.master - masters) <= LAYER
    if mode["stage"] == 2:
        assert memory.gradients <= LAYERS * LAYER // RANKS + LAYER
        assert memory.buckets <= 3 * LAYER
    else:
        assert memory.gradients >= total
        assert memory.buckets == 0
    assert memory == expected


@pytest.mark.parametrize("micro_batches", [1, 3])
@sharded
def test_memory_does_not_grow_from_step_to_step(stage, micro_batches):
    model = deep()
    with init(bucket_mb=BUCKET_MB) as world:
        optimizer = world.optimizer(model, ADAMW, stage=stage, overlap_forward=True)
        measured = []
        for _ in range(4):
            for _ in range(micro_batches - 1):
                with optimizer.no_sync():
                    model(torch.ones(2, WIDTH)).square().mean().backward()
            model(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            measured.append(optimizer.memory())
    assert len(set(measured)) == 1
