"""Optimizers made one after another over the same parameters, against plain torch.

A parameter has one optimizer at a time: the newest. The one before is closed, on all ranks at the
same point, and refuses to be used.
"""

import copy
import gc

import pytest
import torch
from mpi4py import MPI
from oracle import ADAMW, QUICK_STAGES, SGD, SHARED, init, keep_worlds, loss_of, mine
from oracle import samples as draw
from torch import nn
from worlds import refusal

from mntrain.sync import LocalSGD

pytestmark = pytest.mark.mpi

RANKS = MPI.COMM_WORLD.size
KEPT = [stage for stage, _ in QUICK_STAGES]
stages = pytest.mark.parametrize("stage", KEPT)
# Of the old and the new optimizer.
PAIRS = [(0, 0), (0, 1), (1, 0), (2, 1), (0, 2), (2, 2)]
CLOSED = "was closed when another one was made that trains 0.weight"
LEFT = "of an optimizer that is closed"


@pytest.fixture(scope="module")
def trainings():
    yield from keep_worlds()


@pytest.fixture
def world(trainings):
    return trainings(bucket_mb=SHARED)


def net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)
    ).double()


class Both:
    """A model here and its copy in plain torch, with an optimizer of each."""

    def __init__(self, world, stage=0, kind=SGD, pick=None, **options):
        self.world, self.model = world, net()
        self.copy = copy.deepcopy(self.model)
        self.old = []
        self.make(stage, kind, pick, **options)

    def make(self, stage, kind, pick=None, **options):
        pick = pick or (lambda model: list(model.parameters()))
        self.plain = kind(pick(self.copy))
        made = self.world.optimizer(
            self.model, kind, groups=pick(self.model), stage=stage, overlap_forward=True, **options
        )
        self.old.append(made)
        self.optimizer = made

    def backward(self, seed):
        batch = draw(12, seed=seed)
        loss_of(self.copy, batch).backward()
        loss_of(self.model, mine(self.world, batch)).backward()

    def update(self):
        self.plain.step()
        self.optimizer.step()

    def train(self, *seeds):
        for seed in seeds:
            self.backward(seed)
            self.update()
            self.plain.zero_grad()
            self.optimizer.zero_grad()

    def check(self):
        self.optimizer.wait_for_parameters()
        for ours, theirs in zip(self.model.parameters(), self.copy.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
        values = [p.tolist() for p in self.model.parameters()]
        assert all(other == values for other in self.world.gather(values))

    def close(self):
        for optimizer in self.old:
            optimizer.close()


def head(model):
    return list(model[4].parameters())


def body(model):
    return [p for layer in model[:4] for p in layer.parameters()]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_second_phase_trains_as_in_torch(world, pair):
    old, new = pair
    both = Both(world, old)
    both.train(0, 1)
    both.make(new, ADAMW)  # another class
    both.train(2, 3)
    both.make(old, SGD, head)  # fewer parameters
    both.train(4)
    both.make(new, SGD)  # more of them
    both.train(5, 6)
    both.check()
    first = both.old[0]
    for use in (
        first.step,
        first.no_sync,
        first.synchronize,
        first.exchange,
        lambda: first.share(1),
        lambda: first.backward(None, 1),
        lambda: first.clip_grad_norm_(1.0),
        lambda: first.scale_gradients_(1.0),
        lambda: first.full_gradient(both.model[0].weight),
        lambda: first.load_state_dict(first.state_dict()),
        lambda: first.add_param_group({"params": []}),
    ):
        with pytest.raises(RuntimeError, match=CLOSED):
            use()
    both.backward(7)
    both.plain.zero_grad()
    first.zero_grad()  # as in torch
    both.train(8)
    both.check()
    both.close()
    plain = SGD(both.model.parameters())  # on this rank alone
    loss_of(both.model, draw(3)).backward()
    plain.step()


@stages
def test_the_old_one_stops_whoever_holds_it(world, stage):
    both = Both(world, stage)
    both.train(0)
    both.old.clear()
    both.optimizer = None
    if world.rank:  # not on all ranks
        gc.collect()
    both.make(stage, SGD)
    both.train(1, 2)
    both.check()
    both.close()


@stages
def test_a_parameter_moves_to_the_optimizer_that_it_is_added_to(world, stage):
    both = Both(world, stage, SGD, head)
    both.train(0)
    first = both.optimizer
    both.make(stage, SGD, body)
    both.train(1)
    both.copy.zero_grad()
    first.zero_grad()
    with_names = [("4.weight", both.model[4].weight), ("4.bias", both.model[4].bias)]
    both.optimizer.add_param_group({"params": with_names})
    both.plain.add_param_group({"params": head(both.copy)})
    both.train(2, 3)
    both.check()
    with pytest.raises(RuntimeError, match=r"trains 4\.weight"):
        first.step()
    both.close()


@stages
def test_optimizers_of_different_parameters_take_turns(world, stage):
    both = Both(world, stage, ADAMW, head)
    heads = both.plain, both.optimizer
    both.make(stage, SGD, body)
    bodies = both.plain, both.optimizer
    for seed in range(4):
        both.backward(seed)
        both.plain, both.optimizer = (heads, bodies)[seed % 2]
        both.update()
        both.copy.zero_grad()
        for optimizer in both.old:
            optimizer.zero_grad()
    both.check()
    both.close()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_gradient_outlives_its_optimizer_or_is_refused(world, pair):
    old, new = pair
    both = Both(world, old)
    both.backward(0)
    both.make(new, SGD)
    if old and RANKS > 1:
        with pytest.raises(RuntimeError, match=LEFT):
            both.optimizer.step()
        with pytest.raises(RuntimeError, match=LEFT):
            both.backward(1)
        both.copy.zero_grad()
        both.optimizer.zero_grad()
    else:
        both.backward(1)  # adds to it
        both.update()
        both.copy.zero_grad()
        both.optimizer.zero_grad()
    both.train(2)
    both.check()
    both.close()


@pytest.mark.parametrize("explicitly", [True, False])
@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (2, 2)])
def test_an_accumulation_that_has_not_ended_is_refused(world, pair, explicitly):
    old, new = pair
    both = Both(world, old)
    with both.optimizer.no_sync():
        both.optimizer.backward(loss_of(both.model, mine(world, draw(12))), weight=5)
    if explicitly:
        both.optimizer.close()
    both.make(new, SGD)
    with pytest.raises(RuntimeError, match=LEFT):
        both.optimizer.step()
    both.model.zero_grad()
    both.optimizer.zero_grad()
    both.train(1, 2)
    both.check()
    both.close()


@stages
def test_a_gradient_from_before_counts_as_in_torch(world, stage):
    model = net()
    plain = copy.deepcopy(model)
    loss_of(plain, draw(12)).backward()
    loss_of(model, mine(world, draw(12))).backward()
    kind = SGD(plain.parameters())
    optimizer = world.optimizer(model, SGD, stage=stage)
    loss_of(plain, draw(12, seed=1)).backward()
    loss_of(model, mine(world, draw(12, seed=1))).backward()
    kind.step()
    optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    optimizer.close()


@stages
@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
def test_one_that_is_made_after_a_batch_was_drawn_knows_its_weight(world, stage, again):
    model = net()
    plain = copy.deepcopy(model)
    optimizer = world.optimizer(model, SGD, stage=stage) if again else None
    alone = SGD(plain.parameters())
    x, y = draw(3 * RANKS + 1)  # unequal parts
    batches = [(x, y), (x + 1, y)]
    for step, batch in enumerate(world.shard(batches)):
        if again == step:
            optimizer = world.optimizer(model, SGD, stage=stage)
            alone = SGD(plain.parameters())
        loss_of(model, batch).backward()
        loss_of(plain, batches[step]).backward()
        for one in (optimizer, alone):
            one.step()
            one.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    optimizer.close()


@stages
def test_a_refused_optimizer_leaves_the_old_one(world, stage):
    both = Both(world, stage)
    both.train(0)
    refusal(world.optimizer, both.model, torch.optim.LBFGS, stage=stage)
    refusal(world.optimizer, both.model, torch.optim.SGD, stage=3)
    both.train(1)
    both.check()
    both.close()


@pytest.mark.skipif(RANKS % 2 or RANKS < 4, reason="needs two nodes of two ranks")
def test_replicas_are_exchanged_before(world):
    both = Both(world, sync=LocalSGD(every=3))
    said = refusal(world.optimizer, both.model, SGD)
    assert "parameter 0.weight is trained by an optimizer with sync=" in said
    assert "exchange() and close()" in said
    both.optimizer.exchange()
    both.close()
    both.make(0, SGD)
    both.train(1)
    both.close()


@stages
def test_worlds_follow_each_other(stage):
    with init(bucket_mb=SHARED) as world:
        both = Both(world, stage)
        both.train(0, 1)
    with pytest.raises(RuntimeError, match="was closed by close"):
        both.optimizer.step()
    with init(bucket_mb=SHARED) as world:
        both.world = world
        both.make((stage + 1) % 3, SGD)
        both.train(2, 3)
        both.check()
