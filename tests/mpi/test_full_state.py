"""The whole state of an optimizer in torch's form: to plain torch and back."""

import copy
import io
from collections import defaultdict
from functools import partial

import pytest
import torch
from handmade import Keeping, Listed
from oracle import assert_close, mine, update
from states import NumberOfRank, gather_slices
from torch import nn

pytestmark = pytest.mark.simulated


class Eager(torch.optim.Optimizer):
    """Momentum whose buffers are made in the constructor, and nowhere else."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    buffer = self.state[parameter]["buffer"].mul_(0.9).add_(parameter.grad)
                    parameter.sub_(buffer, alpha=group["lr"])


OPTIMIZERS = {
    "Adam": partial(torch.optim.AdamW, lr=0.01),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "eager": Eager,
    "listed": Listed,
    "keeping": Keeping,
    "listed by element": Listed,
}


class TiedAndStrided(nn.Module):
    """A tied weight, a frozen layer, a scalar, and a convolution in another memory format."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.frozen, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.conv = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        hidden = self.last(self.frozen(torch.tanh(self.first(x)))) * self.scale
        return self.conv(hidden.view(-1, 1, 2, 2).expand(-1, 2, 2, 2))


def batch(step, dtype):
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(12, 4, generator=generator, dtype=torch.float64).to(dtype),)


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def groups_of(model):
    first = [*model.first.parameters(), *model.frozen.parameters()]
    rest = [p for p in model.parameters() if all(p is not one for one in first)]
    return [{"params": first, "lr": 0.02}, {"params": rest}]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("grouped", [False, True])
def test_plain_torch_continues_from_ours_and_ours_from_plain_torch(
    world, make, stage, kind, grouped
):
    dtype, optimizer_class = torch.float64, OPTIMIZERS[kind]
    options = {"partition": "element"} if kind.endswith("by element") else {}
    oracle = TiedAndStrided().to(dtype)
    model, alone = copy.deepcopy(oracle), copy.deepcopy(oracle)

    def plain_optimizer(of):
        return optimizer_class(groups_of(of) if grouped else of.parameters())

    whole = plain_optimizer(oracle)
    groups = groups_of(model) if grouped else None
    ours = make(model, optimizer_class, stage=stage, groups=groups, **options)
    for step in range(2):
        update(ours, loss_of(model, *mine(world, batch(step, dtype))))
    file = io.BytesIO()
    torch.save(ours.full_state_dict(), file)
    file.seek(0)
    plain = plain_optimizer(alone)
    plain.load_state_dict(torch.load(file))
    alone.load_state_dict(model.state_dict())
    for step in range(2, 4):
        update(plain, loss_of(alone, *batch(step, dtype)))
    ours.close()
    other = TiedAndStrided().to(dtype, memory_format=torch.contiguous_format)
    groups = groups_of(other) if grouped else None
    again = make(other, optimizer_class, stage=(stage + 1) % 3, groups=groups, **options)
    other.load_state_dict(alone.state_dict())
    again.load_state_dict(plain.state_dict())
    for step in range(4, 6):
        update(again, loss_of(other, *mine(world, batch(step, dtype))))
    for step in range(6):
        update(whole, loss_of(oracle, *batch(step, dtype)))
    assert_close(other, oracle)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_master_weights_are_in_the_whole_state(world, make, stage):
    models = [TiedAndStrided().bfloat16() for _ in range(2)]
    one, two = (make(model, OPTIMIZERS["Adam"], stage=stage) for model in models)
    x = mine(world, batch(0, torch.bfloat16))
    update(one, loss_of(models[0], *x))
    models[1].load_state_dict(models[0].state_dict())
    two.load_state_dict(one.full_state_dict())
    for model, optimizer in zip(models, (one, two), strict=True):
        update(optimizer, loss_of(model, *x))
    first, second = one.full_state_dict()["master"], two.full_state_dict()["master"]
    assert first.keys() == second.keys() != set()
    assert all(torch.equal(first[number], second[number]) for number in first)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_part_of_the_state_is_not_pickled(world, make, stage):
    model = TiedAndStrided()
    optimizer = make(model, OPTIMIZERS["Adam"], stage=stage)
    loss_of(model, *mine(world, batch(0, torch.float32))).backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"full_state_dict\(\).*world\.checkpoints"):
        torch.save(state, io.BytesIO())
    file = io.BytesIO()
    torch.save({**state, "slices": list(state["slices"])}, file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))


@pytest.mark.parametrize("stage", [1, 2])
def test_state_of_no_parameter_that_differs_by_rank_is_not_whole(world, make, stage):
    model = TiedAndStrided()
    optimizer = make(model, NumberOfRank, stage=stage)
    update(optimizer, loss_of(model, *mine(world, batch(0, torch.float32))))
    differs = pytest.raises(RuntimeError, match="has rank/number under a key that is no parameter")
    with differs:
        optimizer.full_state_dict()


def damp_values(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def damp_by_key(optimizer):
    for key in list(optimizer.state):
        optimizer.state[key]["exp_avg"].mul_(0.5)


def replace_by_key(optimizer):
    for key, state in optimizer.state.items():
        optimizer.state[key] = {k: v / 2 if k == "exp_avg" else v for k, v in state.items()}


def replace_all(optimizer):
    halved = {
        key: {k: v / 2 if k == "exp_avg" else v for k, v in state.items()}
        for key, state in optimizer.state.items()
    }
    optimizer.state = defaultdict(dict, halved)


def load_changed(optimizer):
    whole = hasattr(optimizer, "full_state_dict")
    state = optimizer.full_state_dict() if whole else copy.deepcopy(optimizer.state_dict())
    for each in state["state"].values():
        each["exp_avg"] /= 2
    optimizer.load_state_dict(state)


def clear(optimizer):
    optimizer.state.clear()


CHANGES = [damp_values, damp_by_key, replace_by_key, replace_all, load_changed, clear]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_changes_of_all_state_are_those_of_plain_torch(world, make, stage, partition):
    oracle = TiedAndStrided().double()
    model = copy.deepcopy(oracle)
    alone = OPTIMIZERS["Adam"](oracle.parameters())
    ours = make(model, OPTIMIZERS["Adam"], stage=stage, partition=partition)
    for step in range(len(CHANGES) + 1):
        update(ours, loss_of(model, *mine(world, batch(step, torch.float64))))
        update(alone, loss_of(oracle, *batch(step, torch.float64)))
        for change in CHANGES[step : step + 1]:
            change(ours)
            change(alone)
    assert_close(model, oracle)


def test_a_group_that_was_added_is_gathered_with_the_others(world, make):
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    optimizer = make(model, OPTIMIZERS["Adam"], stage=2)
    x = torch.ones(2, 5)
    update(optimizer, model(x).sum())
    model[0].requires_grad_(True)
    added = [(f"0.{name}", p) for name, p in model[0].named_parameters()]
    optimizer.add_param_group({"params": added, "lr": 0.5})
    update(optimizer, model(x).sum())
    counts = {piece.name: int(piece.others["step"]) for piece in gather_slices(optimizer)}
    expected = {n: 1 if n[0] == "0" else 2 for n, _ in model.named_parameters()}
    assert counts == (expected if world.master else {})
