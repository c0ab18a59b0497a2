"""Weights that must be equal on all ranks, and differ in one bit on one of them."""

import pytest
import torch
from mpi4py import MPI
from oracle import SGD, SMALL, update
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from worlds import RANKS, SIDES
from worlds import refusal as refused_by_all

from mntrain.sync import DiLoCo
from zero.comparison import DifferentWeightsError
from zero.exchange.exchange import EXCHANGED

pytestmark = pytest.mark.simulated

RANK = MPI.COMM_WORLD.rank
LAST = RANKS - 1
ODD = RANK == LAST
stages = pytest.mark.parametrize("stage", [0, 1, 2])


@pytest.fixture
def world(worlds):
    return worlds(layout=1, bucket_mb=SMALL)


def net(dtype=torch.float32):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3), nn.Linear(3, 2))
    model[2].requires_grad_(False)
    return model.to(dtype)


def flip(tensor, byte=0):
    """Flip the lowest bit of a byte of the last element, by default the lowest one."""
    tensor.detach().view(-1).view(torch.uint8)[byte - tensor.element_size()] ^= 1


def loss(model, step):
    return model(torch.full((2, 5), 0.1 * (1 + step + RANK), dtype=model[0].weight.dtype)).sum()


def refusal(optimizer, model, step):
    """The error that a step raises on all ranks."""
    loss(model, step).backward()
    return refused_by_all(optimizer.step, error=DifferentWeightsError)


@stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["0.weight", "3.bias", "2.weight"])  # first, last, frozen
def test_one_bit_on_one_rank_is_found_in_the_step_that_compares(make, stage, dtype, name):
    model = net(dtype)
    optimizer = make(model, SGD, stage=stage, check_every=2)
    for step in range(4):
        update(optimizer, loss(model, step))
    optimizer.wait_for_parameters()
    if ODD:
        flip(model.get_parameter(name))
    found = refusal(optimizer, model, 4)
    of = f"after step 4, the weights differ between ranks: {SIDES}, first in"
    assert found.startswith(f"{of} {name}")
    assert optimizer.weight_checks[0] == 4  # after 0, 1, 2 and 4 steps


class UntrainedKind(nn.Parameter):
    pass


def with_untrained():
    """A model with parameters that nobody trains, with values of this rank."""
    model, values = net(), torch.arange(6) + RANK
    model.register_parameter("codes", nn.Parameter(values, requires_grad=False))
    model.register_parameter("flags", nn.Parameter(values > 3, requires_grad=False))
    model.register_parameter("derived", UntrainedKind(values.double(), requires_grad=False))
    pair = TwoTensor(values.float(), -values.float())
    model.register_parameter("pair", nn.Parameter(pair, requires_grad=False))
    model.register_parameter("left", nn.Parameter(values.float()))  # requires a gradient
    return model


@stages
@pytest.mark.parametrize("name", ["codes", "flags", "derived", "pair.b", "left"])
def test_what_no_optimizer_trains_becomes_rank_0s_and_is_compared(make, stage, name):
    model = with_untrained()
    groups = [p for n, p in model.named_parameters() if n != "left"]
    optimizer = make(model, SGD, stage=stage, check_every=2, groups=groups)
    parameter, *part = name.split(".")
    tensor = getattr(model.get_parameter(parameter), *part) if part else getattr(model, name)
    values = torch.arange(6)
    assert (
        tensor.tolist() == (values > 3 if name == "flags" else -values if part else values).tolist()
    )
    update(optimizer, loss(model, 0))
    optimizer.wait_for_parameters()
    update(optimizer, loss(model, 1))
    if ODD:
        flip(tensor)
    assert f"first in {name}" in refusal(optimizer, model, 2)


def test_at_stage_1_a_bit_of_a_trained_parameter_lasts_until_the_next_step(make):
    model = net()
    optimizer = make(model, SGD, stage=1)
    for step in range(3):
        update(optimizer, loss(model, step))
    optimizer.wait_for_parameters()
    for parameter in [p for p in model.parameters() if p.requires_grad] if ODD else []:
        flip(parameter, byte=1)  # as far as others own it, the step overwrites it; else it is sent
    update(optimizer, loss(model, 3))
    update(optimizer, loss(model, 4))
    assert optimizer.weight_checks[0] == 4


def test_weights_are_compared_after_1_2_4_and_so_on_and_then_every_few_steps(make):
    model, counts = net(), []
    optimizer = make(model, SGD, check_every=10)
    for step in range(31):
        update(optimizer, loss(model, step))
        counts.append(optimizer.weight_checks[0])
    before = [0, *counts]
    compared = [step for step in range(31) if before[step + 1] > before[step]]
    assert compared == [0, 1, 2, 4, 8, 10, 20, 30]


def test_one_bit_is_found_later_if_the_step_compares_nothing(make):
    model = net()
    optimizer = make(model, SGD, check_every=3)
    for step in range(6):
        if step == 4 and ODD:
            flip(model[0].bias, byte=1)  # so that no rounding of the update takes it back
        update(optimizer, loss(model, step))
    assert refusal(optimizer, model, 6).startswith("after step 6, the weights differ")
    never = make(net(), SGD, check_every=0)
    if ODD:
        flip(model[0].bias)
    update(never, loss(model, 0))
    assert never.weight_checks == (0, 0.0)


def test_master_weights_of_which_all_ranks_hold_a_copy_are_compared(make):
    model = net(torch.bfloat16)
    optimizer = make(model, SGD, check_every=1)
    update(optimizer, loss(model, 0))
    if ODD:
        flip(next(iter(optimizer._shard.pieces)).tensor)
    assert "first in the master weights of 3.bias" in refusal(optimizer, model, 1)


def test_nodes_are_compared_in_an_exchange_alone(make):
    model = net()
    optimizer = make(
        model, torch.optim.SGD, lr=0.1, sync=DiLoCo(every=3), overlap_forward=False, check_every=1
    )
    for step in range(11):
        assert optimizer.in_sync == (step % 3 == 0)
        update(optimizer, loss(model, step))
        assert optimizer.weight_checks[0] == (step + 1) // 3
        if step == 8 and ODD:  # after which the parameters of nodes differ anyway
            flip(optimizer.sync_schedule.state(model[0].weight)[EXCHANGED], byte=1)
    assert f"after step 12, the weights differ between ranks: {SIDES}, first in 0.weight" in (
        refusal(optimizer, model, 11)
    )
