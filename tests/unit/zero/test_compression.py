"""Residuals, and hooks between nodes, without communication."""

import math
from types import SimpleNamespace

import pytest
import torch
from first_of_two import FirstOfTwo, zero
from torch import nn

from zero.comm_hooks import CommHook, NodeLevels
from zero.comm_hooks.between_nodes import Int8Hook, Residual, Unsent

# Residuals.


def nothing(numel, dtype=torch.float32):
    return Residual(Unsent(torch.zeros(numel, dtype=dtype), 1.0, 0.0))


def test_means_lose_nothing_whatever_the_units_and_divisors():
    residual = nothing(50, torch.float64)
    wanted = torch.zeros(50, dtype=torch.float64)
    arrived = torch.zeros_like(wanted)
    torch.manual_seed(0)
    units = [(1.0, 8.0), (1.0, 8.0), (4.0, 32.0), (4.0, 9.0), (0.5, 9.0), (2.0**-16, 7.0)]
    for multiplier, divisor in units:
        gradient = torch.randn(50).double() * 2.0 ** torch.randint(-20, 12, (50,)).double()
        wanted += gradient
        total = residual.add(gradient * (divisor / multiplier), multiplier)
        message = total.clone()
        message[::2] = 0.0
        total.sub_(message)
        residual.reduced(divisor)
        residual.end_step(taken=True)
        arrived += message * (multiplier / divisor)
    state = residual.of_step
    kept = state.residual * (state.multiplier / state.divisor)
    torch.testing.assert_close(arrived + kept, wanted, rtol=1e-12, atol=1e-9)
    assert kept.abs().sum() > 1


@pytest.mark.parametrize("reductions", [1, 2, 3])
def test_a_step_that_is_not_taken_leaves_no_trace(reductions):
    residual = nothing(8)
    residual.add(torch.arange(8.0), 1.0)
    residual.reduced(2.0)
    residual.end_step(taken=True)
    before = residual.of_step.residual.clone()
    for value in [1e30, math.nan, math.inf][:reductions]:
        residual.add(torch.full((8,), value), 3.0)
        residual.reduced(5.0)
    residual.add(torch.full((8,), math.nan), 3.0)
    residual.end_step(taken=False)
    assert torch.equal(residual.of_step.residual, before)
    assert torch.equal(residual.add(torch.zeros(8), 1.0), before)


def test_a_residual_is_restored_but_nothing_in_it_that_is_not_finite():
    residual = nothing(3)
    residual.add(torch.tensor([1.0, math.nan, math.inf]), 2.0)
    residual.reduced(3.0)
    residual.end_step(taken=True)
    assert residual.of_step.residual.tolist() == [1.0, 0.0, 0.0]
    other = Residual(residual.of_step)
    assert torch.equal(other.add(torch.zeros(3), 0.5), residual.add(torch.zeros(3), 0.5))


# Hooks between nodes.


def test_a_hook_between_nodes_needs_levels_no_schedule_and_an_optimizer_of_its_own():
    class BetweenAll(CommHook):
        world_only = True

    hook, levels = Int8Hook(), SimpleNamespace()
    for given, among, scheduled, words in [
        (hook, None, False, "Int8Hook needs `levels`"),
        (hook, levels, True, r"Int8Hook communicates over .* in every step, and a sync schedule"),
        (BetweenAll(), None, True, "BetweenAll communicates over all ranks in every step"),
    ]:
        with pytest.raises(ValueError, match=words):
            given.bind(2, among, scheduled=scheduled)
    BetweenAll().bind(2, None, scheduled=False)
    CommHook().bind(2, levels, scheduled=True)
    hook.bind(2, levels, scheduled=False)
    with pytest.raises(ValueError, match="make a hook for each"):
        hook.bind(2, levels, scheduled=False)


class CountingHook(CommHook):
    """Keeps a number."""

    between_nodes = True

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state.get("value", 0)


class RenamedHook(CountingHook):
    """The same under another name."""


def optimizer_of(hook, nodes=((0, 1), (2, 3)), size=2, *, turned=False):
    weight = nn.Parameter(torch.ones(3, 2).T if turned else torch.ones(2, 3))
    world = type("Several", (FirstOfTwo,), {"size": size})
    levels = NodeLevels(None, None, nodes, (0, 2, 4))
    options = {"stage": 1, "comm_hook": hook, "levels": levels}
    return zero([("p", weight)], world=world, **options)


OTHERS = [
    {"nodes": ((0, 2), (1, 3))},
    {"size": 3},
    {"turned": True},
    {"hook": RenamedHook(5)},
]


@pytest.mark.parametrize("other", OTHERS, ids=" ".join)
def test_a_state_is_loaded_only_where_ranks_nodes_and_buckets_are_the_same(other):
    state = optimizer_of(CountingHook(7)).state_dict()
    state["slices"] = list(state["slices"])
    same, anew, without = CountingHook(), other.get("hook", CountingHook(5)), CountingHook(5)
    optimizer_of(same).load_state_dict(state)
    with pytest.warns(UserWarning, match="the hook starts anew"):
        optimizer_of(**{"hook": anew, **other}).accumulation.load_hook_state(state["comm_hook"])
    del state["comm_hook"]
    optimizer_of(without).load_state_dict(state)
    assert (same.value, anew.value, without.value) == (7, 0, 0)


@pytest.mark.parametrize(
    ("hook", "count", "sharded", "note"),
    [
        (Int8Hook(), 1, False, "all ranks are on one node"),
        (Int8Hook(), 7, False, ""),
        (Int8Hook(), 8, False, "1 times the bytes of fp32 gradients between 8 nodes"),
        (Int8Hook(), 3, True, ""),
        (Int8Hook(), 16, True, "4.1 times the bytes of fp32 gradients between 16 nodes"),
    ],
)
def test_the_note_says_where_compression_sends_no_less(hook, count, sharded, note):
    said = hook.note(count, sharded=sharded)
    assert note in said
    assert bool(note) == bool(said)
