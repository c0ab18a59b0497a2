"""Optimizers made one after another over the same parameters, against plain torch.

A parameter has one optimizer at a time: the newest. The one before is closed, on all ranks at the
same point, and refuses to be used.
"""

import gc

import pytest
import torch
from models import net
from oracle import ADAMW, QUICK_STAGES, SGD, SHARED, Pair, init, loss_of, mine, samples
from worlds import RANKS, refusal

from mntrain.sync import LocalSGD

pytestmark = pytest.mark.simulated

stages = pytest.mark.parametrize("stage", [stage for stage, _ in QUICK_STAGES])
# Of the old and the new optimizer.
pairs = pytest.mark.parametrize(("old", "new"), [(0, 0), (0, 1), (1, 0), (2, 1), (0, 2), (2, 2)])
CLOSED = "was closed when another one was made that trains 0.weight"
LEFT = "of an optimizer that is closed"


class Successors(Pair):
    """A model here and its copy in plain torch, of which optimizers are made one after another."""

    def __init__(self, world, stage=0, kind=SGD, pick=None, **options):
        self.old = []
        super().__init__(world, self._made, net(), kind, groups=pick, stage=stage, **options)

    def _made(self, model, kind, **options):
        made = self.world.optimizer(model, kind, overlap_forward=True, **options)
        self.old.append(made)
        return made

    def make(self, stage, kind, pick=lambda model: list(model.parameters())):
        self.alone.optimizer = kind(pick(self.alone.model))
        groups = pick(self.model)
        self.optimizer = self._made(self.model, kind, groups=groups, stage=stage)

    def zero_grad(self):
        self.alone.model.zero_grad()
        self.optimizer.zero_grad()

    def finish(self):
        self.check()
        for optimizer in self.old:
            optimizer.close()


def head(model):
    return list(model[3].parameters())


def body(model):
    return [p for layer in model[:3] for p in layer.parameters()]


@pairs
def test_a_second_phase_trains_as_in_torch(world, old, new):
    both = Successors(world, old)
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
    both.alone.optimizer.zero_grad()
    first.zero_grad()  # as in torch
    both.train(8)
    both.finish()
    plain = SGD(both.model.parameters())  # on this rank alone
    loss_of(both.model, samples(3)).backward()
    plain.step()


@stages
def test_the_old_one_stops_whoever_holds_it(world, stage):
    both = Successors(world, stage)
    both.train(0)
    both.old.clear()
    both.optimizer = None
    if world.rank:  # not on all ranks
        gc.collect()
    both.make(stage, SGD)
    both.train(1, 2)
    both.finish()


@pytest.mark.filterwarnings("ignore:.*no optimizer of all ranks trains it:UserWarning")
@stages
def test_a_parameter_moves_to_the_optimizer_that_it_is_added_to(world, stage):
    both = Successors(world, stage, SGD, head)
    both.train(0)
    first = both.optimizer
    both.make(stage, SGD, body)
    both.train(1)
    both.alone.model.zero_grad()
    first.zero_grad()
    with_names = [("3.weight", both.model[3].weight), ("3.bias", both.model[3].bias)]
    both.optimizer.add_param_group({"params": with_names})
    both.alone.optimizer.add_param_group({"params": head(both.alone.model)})
    both.train(2, 3)
    with pytest.raises(RuntimeError, match=r"trains 3\.weight"):
        first.step()
    both.finish()


@pairs
def test_a_gradient_outlives_its_optimizer_or_is_refused(world, old, new):
    both = Successors(world, old)
    both.backward(0)
    both.make(new, SGD)
    if old:
        with pytest.raises(RuntimeError, match=LEFT):
            both.optimizer.step()
        with pytest.raises(RuntimeError, match=LEFT):
            both.backward(1)
        both.zero_grad()
    else:
        both.train(1)  # adds to it
    both.train(2)
    both.finish()


@pytest.mark.parametrize("explicitly", [True, False])
@pytest.mark.parametrize(("old", "new"), [(0, 1), (1, 0), (2, 2)])
def test_an_accumulation_that_has_not_ended_is_refused(world, old, new, explicitly):
    both = Successors(world, old)
    with both.optimizer.no_sync():
        both.optimizer.backward(loss_of(both.model, mine(world, samples(12))), weight=5)
    if explicitly:
        both.optimizer.close()
    both.make(new, SGD)
    with pytest.raises(RuntimeError, match=LEFT):
        both.optimizer.step()
    both.model.zero_grad()
    both.optimizer.zero_grad()
    both.train(1, 2)
    both.finish()


@stages
def test_a_gradient_from_before_counts_as_in_torch(world, pair, stage):
    model = net()
    loss_of(model, mine(world, samples(12))).backward()
    both = pair(model, SGD, stage=stage)
    both.alone.model.zero_grad()
    loss_of(both.alone.model, samples(12)).backward()
    both.train(1)
    both.check()


@stages
@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
def test_one_that_is_made_after_a_batch_was_drawn_knows_its_weight(world, stage, again):
    both = Successors(world, stage) if again else None
    x, y = samples(3 * RANKS + 1)  # unequal parts
    batches = [(x, y), (x + 1, y)]
    for batch, whole in zip(world.shard(batches), batches, strict=True):
        if both is None:
            both = Successors(world, stage)
        elif again and whole is batches[1]:
            both.make(stage, SGD)
        loss_of(both.model, batch).backward()
        loss_of(both.alone.model, whole).backward()
        both.update()
    both.finish()


@stages
def test_a_refused_optimizer_leaves_the_old_one(world, stage):
    both = Successors(world, stage)
    both.train(0)
    refusal(world.optimizer, both.model, torch.optim.LBFGS, stage=stage)
    refusal(world.optimizer, both.model, torch.optim.SGD, stage=3)
    both.train(1)
    both.finish()


def test_replicas_are_exchanged_before(worlds):
    world = worlds(layout=1)
    both = Successors(world, sync=LocalSGD(every=3))
    said = refusal(world.optimizer, both.model, SGD)
    assert "parameter 0.weight is trained by an optimizer with sync=" in said
    assert "exchange() and close()" in said
    both.optimizer.exchange()
    both.optimizer.close()
    both.make(0, SGD)
    both.train(1)
    both.optimizer.close()


@stages
def test_worlds_follow_each_other(stage):
    with init(bucket_mb=SHARED) as world:
        both = Successors(world, stage)
        both.train(0, 1)
    with pytest.raises(RuntimeError, match="was closed by close"):
        both.optimizer.step()
    with init(bucket_mb=SHARED) as world:
        both.world = world
        both.make((stage + 1) % 3, SGD)
        both.train(2, 3)
        both.check()
