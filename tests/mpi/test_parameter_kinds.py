"""Complex and sparse parameters, named groups, and optimizers that cannot be sharded."""

import copy

import pytest
import torch
from handmade import DAdapting, Normalized
from models import net
from oracle import ADAMW, MAX_NORM, SGD, modes
from torch import nn
from worlds import BUT_LAST, refusal

from zero.comm_hooks import CommHook

pytestmark = pytest.mark.simulated


class Waves(nn.Module):
    """Complex and real parameters in turn, a complex scalar, and complex rows in another order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        kind = {"dtype": torch.complex128}
        self.first = nn.Parameter(torch.randn(16, 5, **kind).T)
        self.shift = nn.Parameter(torch.randn(16, dtype=torch.float64))
        self.turn = nn.Parameter(torch.randn((), **kind))
        self.last = nn.Parameter(torch.randn(16, 3, **kind))

    def forward(self, x):
        hidden = torch.tanh((x.to(self.first.dtype) @ self.first).abs() + self.shift)
        return ((hidden * self.turn) @ self.last).abs()


def check(pair, model, kind=ADAMW, **options):
    """Train on all ranks and alone: equal weights, norms, and weights after a state is loaded."""
    both = pair(model, kind, max_grad_norm=MAX_NORM, **options)
    for step in range(3):
        ((result, norm),) = both.train(step)
        assert result.grad_norm == pytest.approx(norm, rel=1e-9)
        both.optimizer.load_state_dict(copy.deepcopy(both.optimizer.state_dict()))
    both.check()


@modes
@pytest.mark.parametrize("kind", [ADAMW, SGD], ids=["AdamW", "SGD"])
def test_complex_parameters_train_as_in_torch(pair, kind, mode):
    check(pair, Waves(), kind, **mode)


@modes
def test_complex_gradients_are_those_of_torch_before_and_after_clipping(pair, mode):
    both = pair(Waves(), SGD, **mode)
    both.backward(2)
    for _ in range(2):
        for ours, theirs in both.parameters():
            torch.testing.assert_close(both.optimizer.full_gradient(ours), theirs.grad)
        norm = nn.utils.clip_grad_norm_(both.alone.model.parameters(), MAX_NORM)
        torch.testing.assert_close(both.optimizer.clip_grad_norm_(MAX_NORM).double(), norm)
    both.optimizer.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_complex_gradients_are_not_rounded_to_a_wire_dtype(pair, stage):
    check(pair, Waves(), SGD, stage=stage, comm_hook=CommHook())
    model = Waves()
    model.shift.requires_grad_(False)  # it would be rounded
    check(pair, model, SGD, stage=stage, comm_hook=CommHook(torch.bfloat16))


@pytest.mark.parametrize("kind", [Normalized, DAdapting])
def test_statistics_over_all_parameters_are_those_of_torch_at_stage_0(pair, kind):
    both = pair(kind=kind)
    both.train(0, 1, 2)
    both.check()


def odd(world, usual, other):
    return other if world.rank == world.size - 1 else usual


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("usual", "other", "words"),
    [
        ({"lr": 0.1}, {"lr": 0.2}, "lr=0.1 in group 0, rank {} has lr=0.2 in group 0"),
        (
            {"lr": torch.tensor(0.5)},
            {"lr": torch.tensor(0.25)},
            "lr=0.5 in group 0, rank {} has lr=0.25 in group 0",
        ),
        (
            {"betas": (0.9, 0.99)},
            {"betas": (0.8, 0.99)},
            "betas=(0.9, 0.99) in group 0, rank {} has betas=(0.8, 0.99) in group 0",
        ),
        (
            {"optimizer_class": torch.optim.Adam},
            {"optimizer_class": torch.optim.AdamW},
            "Adam, rank {} has AdamW",
        ),
    ],
    ids=["lr", "tensor lr", "betas", "class"],
)
def test_different_optimizers_are_refused_by_all_ranks(world, stage, usual, other, words):
    given = {"optimizer_class": torch.optim.Adam, **odd(world, usual, other)}
    said = refusal(world.optimizer, net(), stage=stage, **given)
    words = words.format(world.size - 1)
    assert said == f"the optimizer differs between ranks: {BUT_LAST} {words}"


@pytest.mark.parametrize("stage", [0, 1])
def test_different_groups_are_refused_by_all_ranks(world, stage):
    model, last = net(), world.size - 1
    first, *rest = model.parameters()
    differ = f"the optimizer differs between ranks: {BUT_LAST}"
    fewer = [{"params": odd(world, [first, *rest], list(model[0].parameters()))}]
    swapped = [{"params": odd(world, [first], rest)}, {"params": odd(world, rest, [first])}]
    for groups, words in (
        (fewer, f"2.weight in group 0, rank {last} has no more"),
        (swapped, f"0.weight in group 0, rank {last} has 0.bias in group 0"),
    ):
        said = refusal(world.optimizer, model, torch.optim.SGD, stage=stage, lr=0.1, groups=groups)
        assert said == f"{differ} {words}"
