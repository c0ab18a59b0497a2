"""The state of sharded optimizers: gathered, and loaded at other stages and numbers of ranks.

Worlds of fewer ranks are made inside of one launch: the other ranks sit out.
"""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from handmade import Lamb
from models import Mixed, Strided, WithEmpty, net
from oracle import (
    ADAMW,
    ALGORITHMS,
    EXACT,
    SMALL,
    STAGES,
    PlainTraining,
    assert_parity,
    loss_of,
    samples,
)
from states import SIZES, SubWorlds, assert_same_slices, empty_like, gather_slices, mode_of, saved
from states import train as train_only
from worlds import RANKS

pytestmark = pytest.mark.mpi

STEPS = 3


def train(world, model, optimizer, steps):
    """Take steps, close the optimizer, and give its state and the weights, as from a file."""
    train_only(world, model, optimizer, steps)
    found = saved(optimizer, model)
    optimizer.close()
    return found


@pytest.fixture(scope="module")
def worlds():
    made = SubWorlds()
    yield made
    made.close()


def double(kind):
    torch.manual_seed(4)
    return kind().double()


WHOLE = {"partition": "parameter"}
CASES = {
    "net": (net, ADAMW, {}),
    "empty": (partial(double, WithEmpty), ADAMW, {}),
    "strided": (partial(double, Strided), ADAMW, {}),
    "masters": (Mixed, ADAMW, {}),  # fp32 and bf16
    "norms of parameters": (net, partial(Lamb, lr=0.01), WHOLE),
    "rows and columns": (net, partial(torch.optim.Adafactor, lr=0.05), WHOLE),
}


@pytest.mark.parametrize("case", CASES)
def test_a_state_is_the_same_at_every_stage_and_number_of_ranks(worlds, case):
    """Gathered, loaded elsewhere, and gathered again."""
    world, (make_model, kind, options) = worlds(), CASES[case]
    model = make_model()
    optimizer = world.optimizer(model, kind, **mode_of(4) | options)
    pieces, weights = train(world, model, optimizer, range(2))
    trained = {n for n, p in model.named_parameters() if p.numel()}
    assert {piece.name for piece in pieces} == trained
    assert all(piece.tensors or len(piece.others) > 1 for piece in pieces)  # beside the step
    for number, size in enumerate([*SIZES, *[RANKS] * (len(STAGES) - 1)]):
        other = empty_like(model)
        other.load_state_dict(weights)
        smaller = worlds(size)
        if smaller is None:
            continue
        resumed = smaller.optimizer(other, kind, **mode_of(number) | options)
        resumed.load_slices(pieces)
        found = gather_slices(resumed)
        resumed.close()
        if smaller.rank == 0:
            assert_same_slices(found, pieces)
        else:
            assert found == []


def test_training_goes_on_at_another_stage_partition_and_algorithm(worlds):
    """Every mode hands over to every other: a walk of one step at each stop."""
    count = len(STAGES)  # a prime: strides of 1, 2, ... meet every ordered pair
    walk = [0]
    for stride in range(1, count):
        walk += [(walk[-1] + stride * (hop + 1)) % count for hop in range(count)]
    assert len(set(pairwise(walk))) == count * (count - 1)
    model, pieces = net(), None
    alone = PlainTraining(model, ADAMW)
    for step, place in enumerate(walk):
        alone.step(loss_of(alone.model, samples(12, step)))
        world = worlds(RANKS, ALGORITHMS[step % len(ALGORITHMS)])
        optimizer = world.optimizer(model, ADAMW, **mode_of(place))
        if pieces is not None:
            optimizer.load_slices(pieces)
        pieces, weights = train(world, model, optimizer, [step])
        model = empty_like(model)
        model.load_state_dict(weights)
    assert_parity(worlds(), model, alone, EXACT)


@pytest.mark.parametrize("size", SIZES)
def test_training_goes_on_at_another_number_of_ranks_and_back(worlds, size):
    model = double(Strided)
    alone = PlainTraining(model, ADAMW)
    for step in range(3 * STEPS):
        alone.step(loss_of(alone.model, samples(12, step)))
    pieces = None
    for turn, ranks in enumerate([RANKS, size, RANKS]):
        world, optimizer = worlds(ranks), None
        if world is not None:
            optimizer = world.optimizer(model, ADAMW, **mode_of(turn + size))
            if pieces is not None:
                optimizer.load_slices(pieces)
            train_only(world, model, optimizer, range(turn * STEPS, (turn + 1) * STEPS))
        pieces, weights = saved(optimizer, model)
        if optimizer is not None:
            optimizer.close()
        model = double(Strided)
        model.load_state_dict(weights)
    assert_parity(worlds(), model, alone, EXACT)


@pytest.mark.parametrize("name", ["net", "masters"])
def test_in_the_same_world_a_resumed_run_has_the_bits_of_one_that_never_stopped(worlds, name):
    """Gathered at one stage, loaded at another: stages give the same bits."""
    world = worlds(bucket_mb=SMALL)
    whole = net(torch.float32) if name == "net" else Mixed()
    first = copy.deepcopy(whole)
    optimizer = world.optimizer(whole, ADAMW, stage=0)
    train(world, whole, optimizer, range(2 * STEPS))
    optimizer = world.optimizer(first, ADAMW, stage=2)
    pieces, weights = train(world, first, optimizer, range(STEPS))
    second = empty_like(first)
    second.load_state_dict(weights)
    resumed = world.optimizer(second, ADAMW, stage=1)
    resumed.load_slices(pieces)
    train(world, second, resumed, range(STEPS, 2 * STEPS))
    for (label, ours), theirs in zip(second.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs), label


def test_a_group_that_was_added_is_gathered_with_the_others(worlds):
    world, model = worlds(), net()
    model[0].requires_grad_(False)
    optimizer = world.optimizer(model, ADAMW, stage=2)
    train_only(world, model, optimizer, range(1))
    model[0].requires_grad_(True)
    added = [(f"0.{name}", p) for name, p in model[0].named_parameters()]
    optimizer.add_param_group({"params": added, "lr": 0.5})
    pieces, _ = train(world, model, optimizer, range(1))
    counts = {piece.name: int(piece.others["step"]) for piece in pieces}
    assert counts == {n: 1 if n[0] == "0" else 2 for n, _ in model.named_parameters()}
