"""The state of sharded optimizers: gathered, and loaded at other stages.

test_checkpoint.py loads it on other numbers of ranks.
"""

from itertools import pairwise

import pytest
from models import net
from oracle import ADAMW, ALGORITHMS, STAGES, PlainTraining, assert_parity, loss_of, samples
from states import empty_like, mode_of, saved
from states import train as train_only

pytestmark = pytest.mark.simulated


def train(world, model, optimizer, steps):
    """Take steps, close the optimizer, and give its state and the weights, as from a file."""
    train_only(world, model, optimizer, steps)
    found = saved(optimizer, model)
    optimizer.close()
    return found


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
        world = worlds(ALGORITHMS[step % len(ALGORITHMS)])
        optimizer = world.optimizer(model, ADAMW, **mode_of(place))
        if pieces is not None:
            optimizer.load_slices(pieces)
        pieces, weights = train(world, model, optimizer, [step])
        model = empty_like(model)
        model.load_state_dict(weights)
    assert_parity(world, model, alone)


def test_a_group_that_was_added_is_gathered_with_the_others(world):
    model = net()
    model[0].requires_grad_(False)
    optimizer = world.optimizer(model, ADAMW, stage=2)
    train_only(world, model, optimizer, range(1))
    model[0].requires_grad_(True)
    added = [(f"0.{name}", p) for name, p in model[0].named_parameters()]
    optimizer.add_param_group({"params": added, "lr": 0.5})
    pieces, _ = train(world, model, optimizer, range(1))
    counts = {piece.name: int(piece.others["step"]) for piece in pieces}
    assert counts == {n: 1 if n[0] == "0" else 2 for n, _ in model.named_parameters()}
