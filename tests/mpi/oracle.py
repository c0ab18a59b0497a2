"""The oracle of training tests: plain torch in this process, over the whole of every batch.

Ranks without MPI, of tests/torchrun, have it too.
"""

import copy
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from model_digest import model_digest
from models import net
from torch import nn
from torch.nn import functional

ALGORITHMS = ["naive", "flat", "leader", "lanes"]
EXACT = 1e-11  # in fp64, relative and absolute
MAX_NORM = 0.05  # below the norms that occur: clipping acts in every step

# MiB of a bucket.
OWN = 1e-6  # one for every parameter
SMALL = 1e-4  # for almost every parameter
SHARED = 1e-3  # several parameters share one, and shards cut through parameters

SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=0.01)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


class PlainTraining:
    """A copy of a model, trained with plain torch in this process."""

    def __init__(self, model, optimizer_class, max_norm=math.inf, norm_type=2.0, groups=None):
        self.model = copy.deepcopy(model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer_class(groups(self.model) if groups else trained)
        self._clip = partial(
            nn.utils.clip_grad_norm_, max_norm=max_norm, norm_type=norm_type, foreach=False
        )

    def step(self, loss):
        """Take a step, and give the norm of the gradient."""
        loss.backward()
        return self.update()

    def update(self):
        norm = self._clip([p for group in self.optimizer.param_groups for p in group["params"]])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


def assert_parity(world, model, alone, tolerance=EXACT):
    """The oracle's weights within the tolerance, and the same bits on every rank. Collective."""
    for (name, ours), theirs in zip(
        model.named_parameters(), alone.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert len(set(world.gather(model_digest(model)))) == 1


class Pair:
    """A model that the ranks train, and its copy that plain torch trains. Collective."""

    def __init__(self, world, make, model, kind, *, groups=None, **options):
        self.world, self.model = world, model
        limits = options.get("max_grad_norm", math.inf), options.get("norm_type", 2.0)
        self.alone = PlainTraining(model, kind, *limits, groups)
        given = {"groups": groups(model)} if groups else {}
        self.optimizer = make(model, kind, **given, **options)

    def backward(self, batch):
        """Take the gradients of a batch, or of that of a seed, of which ranks have equal shares."""
        batch = samples(12, seed=batch) if isinstance(batch, int) else batch
        loss_of(self.alone.model, batch).backward()
        loss_of(self.model, mine(self.world, batch)).backward()

    def update(self):
        """Take the step of both; give the result, and the norm of the gradient alone."""
        norm = self.alone.update()
        result = self.optimizer.step()
        self.optimizer.zero_grad()
        return result, norm

    def train(self, *batches):
        """Take a step with each batch, or that of a seed; give the pairs of results."""
        results = []
        for batch in batches:
            self.backward(batch)
            results.append(self.update())
        return results

    def parameters(self):
        """Pairs of parameters, of the ranks and alone."""
        return zip(self.model.parameters(), self.alone.model.parameters(), strict=True)

    def check(self, tolerance=EXACT):
        assert_parity(self.world, self.model, self.alone, tolerance)


def init(algorithm="lanes", ranks_per_node=2, bucket_mb=SMALL, **options):
    from worlds import make_world

    return make_world(algorithm, ranks_per_node, bucket_mb=bucket_mb, **options)


STAGES = [(0, "element"), (1, "element"), (1, "parameter"), (2, "element"), (2, "parameter")]
QUICK_STAGES = [(0, "element"), (1, "element"), (2, "parameter")]  # test_stages.py has all of them
modes = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(
            {"stage": stage, "partition": partition},
            id=f"{stage}-{partition}",
            marks=[] if (stage, partition) in QUICK_STAGES else [pytest.mark.exhaustive],
        )
        for stage, partition in STAGES
    ],
)


def keep_worlds():
    """Yield worlds, closed at the end, for a fixture."""
    from worlds import Worlds

    worlds = Worlds(layout=2, bucket_mb=SHARED)
    yield worlds
    worlds.close()


def make_optimizers(usual):
    """Yield a function that makes optimizers, closed at the end, for a fixture."""
    made = []

    def make(model, optimizer_class, *, world=usual, **options):
        options.setdefault("overlap_forward", True)  # the harder case
        made.append(world.optimizer(model, optimizer_class, **options))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


def update(optimizer, loss):
    """Take a step by the gradient of a loss, which is zeroed then; return the step's result."""
    loss.backward()
    result = optimizer.step()
    optimizer.zero_grad()
    return result


def train_alike(optimizer, model, alone, pairs):
    """Train on this rank's batches and on the whole ones, whose samples give each step's weight."""
    for batch, whole in pairs:
        assert update(optimizer, loss_of(model, batch)).weight == len(whole[0])
        alone.step(loss_of(alone.model, whole))


def assert_close(model, other, tolerance=EXACT, absolute=None):
    """All parameters of two models within a tolerance, relative and absolute unless given."""
    absolute = tolerance if absolute is None else absolute
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=absolute)


def train_in_fp32(world, kind, micro_batches=1, make=None, **options):
    """Train a model in fp32; give the results and all weights of the steps."""
    model = net(torch.float32)
    optimizer = (make or world.optimizer)(model, kind, **options)
    results, weights = [], []
    for step in range(3):
        share = mine(world, samples(12 * micro_batches, step, torch.float32))
        for turn in range(micro_batches):
            part = tuple(column.chunk(micro_batches)[turn] for column in share)
            with nullcontext() if turn == micro_batches - 1 else optimizer.no_sync():
                loss_of(model, part).backward()
        results.append(optimizer.step())
        optimizer.zero_grad()
        weights.append(copy.deepcopy(model.state_dict()))
    optimizer.close()
    return results, weights


def assert_same_weights(first, second):
    """The same bits after every step of two trainings."""
    for step, (ours, theirs) in enumerate(zip(first[1], second[1], strict=True)):
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), f"{name} in step {step}"


def samples(n, seed=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(3, (n,), generator=generator)


def loss_of(model, batch):
    """The mean over the samples of a batch."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def mine(world, batch):
    """This rank's equal share of a batch."""
    return tuple(column.chunk(world.size)[world.rank] for column in batch)


def rows(batch, start, stop):
    return tuple(column[start:stop] for column in batch)
