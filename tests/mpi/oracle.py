"""The oracle of training tests: plain torch in this process, over the whole of every batch."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from worlds import hosts

import mntrain
from mntrain.train.model_digest import model_digest

ALGORITHMS = ["naive", "flat", "leader", "lanes"]
EXACT = 1e-11  # in fp64, relative and absolute
MAX_NORM = 0.05  # below the norms that occur: clipping acts in every step

# MiB of a bucket.
OWN = 1e-6  # one for every parameter
SMALL = 1e-4  # for almost every parameter
SHARED = 1e-3  # several parameters share one, and shards cut through parameters

SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=0.01)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


class Alone:
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


def init(algorithm="lanes", ranks_per_node=2, bucket_mb=SMALL, **options):
    return mntrain.init(
        algorithm=algorithm,
        ranks_per_node=ranks_per_node,
        bucket_mb=bucket_mb,
        device="cpu",
        **options,
    )


STAGES = [(0, "element"), (1, "element"), (1, "parameter"), (2, "element"), (2, "parameter")]
QUICK_STAGES = [(0, "element"), (1, "element"), (2, "parameter")]  # test_stages.py has all of them
modes = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(
            {"stage": stage, "partition": partition},
            id=f"{stage}-{partition}",
            marks=[] if (stage, partition) in QUICK_STAGES else [pytest.mark.thorough],
        )
        for stage, partition in STAGES
    ],
)


class Trainings:
    """Worlds by algorithm, layout and bucket size, each made once and kept. Collective."""

    def __init__(self):
        self._worlds = {}

    def __call__(self, algorithm="lanes", layout=2, bucket_mb=SHARED):
        key = algorithm, layout, bucket_mb
        if key not in self._worlds:
            if isinstance(layout, str):
                with hosts(layout):
                    self._worlds[key] = init(algorithm, None, bucket_mb)
            else:
                self._worlds[key] = init(*key)
        return self._worlds[key]

    def close(self):
        for world in self._worlds.values():
            world.close()


def keep_worlds():
    """What a fixture yields from: worlds, closed at the end."""
    worlds = Trainings()
    yield worlds
    worlds.close()


def make_optimizers(world):
    """What a fixture yields from: makes optimizers of a world, and closes them at the end."""
    made = []

    def make(model, optimizer_class, **options):
        options.setdefault("overlap_forward", True)  # the harder case
        made.append(world.optimizer(model, optimizer_class, **options))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


def train(world, model, optimizer, alone, steps):
    """Equal shares of the same batches, on the ranks and alone; give the pairs of results."""
    results = []
    for step in steps:
        batch = samples(12, seed=step)
        norm = alone.step(loss_of(alone.model, batch))
        loss_of(model, mine(world, batch)).backward()
        results.append((optimizer.step(), norm))
        optimizer.zero_grad()
    return results


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
