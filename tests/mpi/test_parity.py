"""Training on N ranks gives the weights of one process that sees the whole of every batch.

Every rank trains the oracle too, with plain torch. In fp64 a wrong weight of a sample, or a
gradient summed twice, is far above the tolerance; the order of sums is far below it.
"""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import mntrain
from mntrain.loader import shard
from mntrain.sameness import digest

pytestmark = pytest.mark.mpi

RANKS = MPI.COMM_WORLD.size
ALGORITHMS = ["naive", "flat", "leader", "lanes"]
EXACT = 1e-11  # in fp64, relative and absolute
SMALL = 1e-4  # MiB: a bucket for almost every parameter
MAX_NORM = 0.05  # below the norms that occur: clipping acts in every step

SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=0.01)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)

worlds = pytest.mark.parametrize(
    ("algorithm", "ranks_per_node"), [("naive", None), ("flat", None), ("leader", 2), ("lanes", 2)]
)


class LanguageModel(nn.Module):
    """Its embedding and head are one parameter; its norm is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


class Forked(nn.Module):
    """A trunk, and a branch that not every forward takes."""

    def __init__(self):
        super().__init__()
        self.first, self.branch = nn.Linear(5, 8), nn.Linear(8, 8)
        self.last, self.never = nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, x, branch):
        hidden = torch.tanh(self.first(x))
        return self.last(self.branch(hidden) if branch else hidden)


class WithEmpty(nn.Module):
    """Has a parameter of no elements, and a scalar."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.no_rows = nn.Parameter(torch.zeros(0, 5))
        self.inner = nn.Linear(5, 3)

    def forward(self, x):
        rows = torch.cat([self.no_rows, x])
        return self.scale * self.inner(rows)


class Mixed(nn.Module):
    """Parameters of fp32 and of bf16, in turn."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.middle = nn.Linear(8, 8).bfloat16()

    def forward(self, x):
        hidden = torch.tanh(self.first(x)).bfloat16()
        return self.last(torch.tanh(self.middle(hidden)).float())


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).double()


def samples(n, seed=2):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
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


class Alone:
    """The oracle: a copy of a model, trained with plain torch in this process."""

    def __init__(self, model, optimizer_class, max_norm=None):
        self.model = copy.deepcopy(model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = optimizer_class(trained)
        self._max_norm = max_norm

    def step(self, loss):
        """Take a step, and give the norm of the gradient."""
        loss.backward()
        gradients = [p for group in self._optimizer.param_groups for p in group["params"]]
        for p in gradients:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        limit = float("inf") if self._max_norm is None else self._max_norm
        norm = nn.utils.clip_grad_norm_(gradients, limit)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


def assert_parity(world, model, alone, tolerance=EXACT):
    """The oracle's weights within the tolerance, and the same bits on every rank. Collective."""
    for (name, ours), theirs in zip(
        model.named_parameters(), alone.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert len(set(world.gather(digest(model)))) == 1


def init(algorithm="lanes", ranks_per_node=2, bucket_mb=SMALL):
    return mntrain.init(
        algorithm=algorithm, ranks_per_node=ranks_per_node, bucket_mb=bucket_mb, device="cpu"
    )


@pytest.mark.parametrize("ranks_per_node", [None, 1, 2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_shares(algorithm, ranks_per_node):
    model = net()
    alone = Alone(model, ADAMW, MAX_NORM)
    with init(algorithm, ranks_per_node) as world:
        optimizer = world.optimizer(model, ADAMW, max_grad_norm=MAX_NORM)
        for step in range(2):
            batch = samples(12, seed=step)
            norm = alone.step(loss_of(alone.model, batch))
            loss_of(model, mine(world, batch)).backward()
            result = optimizer.step()
            optimizer.zero_grad()
            assert result.weight == RANKS
            assert result.grad_norm == pytest.approx(norm, rel=1e-10)
            assert result.clip_coef < 1
        assert_parity(world, model, alone)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_fp32_only_the_order_of_sums_differs(algorithm):
    model = net().float()
    alone = Alone(model, SGD)
    with init(algorithm) as world:
        optimizer = world.optimizer(model, SGD)
        for step in range(4):
            inputs, targets = samples(12, seed=step)
            batch = inputs.float(), targets
            alone.step(loss_of(alone.model, batch))
            loss_of(model, mine(world, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_parity(world, model, alone, tolerance=2e-6)


@pytest.mark.parametrize("bucket_mb", [1e-6, 3e-4, 1e-3, 25])
def test_buckets_of_any_size(bucket_mb):
    model = net()
    alone = Alone(model, ADAMW)
    with init(bucket_mb=bucket_mb) as world:
        optimizer = world.optimizer(model, ADAMW)
        for step in range(2):
            batch = samples(12, seed=step)
            alone.step(loss_of(alone.model, batch))
            loss_of(model, mine(world, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_parity(world, model, alone)


def shuffling():
    """Batches of 7, 7 and 2 samples: shares are unequal, and in the last some ranks have none."""
    return DataLoader(TensorDataset(*samples(16)), batch_size=7, shuffle=True)


def listed():
    return [rows(samples(16), low, high) for low, high in [(0, 7), (7, 8), (8, 14)]]


@pytest.mark.parametrize("loader", [shuffling, listed])
@worlds
def test_unequal_shares(algorithm, ranks_per_node, loader):
    model = net()
    alone = Alone(model, ADAMW, MAX_NORM)
    with init(algorithm, ranks_per_node) as world:
        optimizer = world.optimizer(model, ADAMW, max_grad_norm=MAX_NORM)
        ours = world.shard(loader(), seed=3)
        whole = shard(loader(), 0, 1, 3, lambda count: None)
        for _ in range(2):
            for batch, global_batch in zip(ours, whole, strict=True):
                norm = alone.step(loss_of(alone.model, global_batch))
                loss_of(model, batch).backward()
                result = optimizer.step()
                optimizer.zero_grad()
                assert result.weight == len(global_batch[1])
                assert result.grad_norm == pytest.approx(norm, rel=1e-10)
        assert_parity(world, model, alone)


def test_accumulated_batches_of_a_loader():
    model = net()
    alone = Alone(model, SGD)
    batches = [samples(7, seed=seed) for seed in range(6)]
    with init() as world:
        optimizer = world.optimizer(model, SGD)
        for index, batch in enumerate(world.shard(batches)):
            with nullcontext() if index % 2 else optimizer.no_sync():
                (loss_of(model, batch) / 2).backward()
            if index % 2:
                assert optimizer.step().weight == 14
                optimizer.zero_grad()
                alone.step(sum(loss_of(alone.model, b) / 2 for b in batches[index - 1 : index + 1]))
        assert_parity(world, model, alone)


@worlds
def test_micro_batches_of_unequal_number_and_size(algorithm, ranks_per_node):
    # Of step 0, rank 0 has samples 0 to 2 and 2 to 3, rank 1 has 3 to 8, rank 2 none, and so on.
    dealt = [[[0, 2, 3], [3, 8], [], [8, 9, 11, 12]], [[0, 4], [], [4, 5, 9], [9, 12]]]
    model = net()
    alone = Alone(model, ADAMW, MAX_NORM)
    with init(algorithm, ranks_per_node) as world:
        optimizer = world.optimizer(model, ADAMW, max_grad_norm=MAX_NORM)
        for step in range(4):
            bounds = dealt[step % 2][: world.size]
            batch = samples(12, seed=step)
            total = max(stop for cuts in bounds for stop in cuts)
            alone.step(loss_of(alone.model, rows(batch, 0, total)))

            cuts = bounds[world.rank]
            for start, stop in pairwise(cuts):
                with nullcontext() if stop == cuts[-1] else optimizer.no_sync():
                    optimizer.backward(loss_of(model, rows(batch, start, stop)), stop - start)
            if not cuts:
                optimizer.share(0)
            result = optimizer.step()
            optimizer.zero_grad()
            assert result.weight == total
        assert_parity(world, model, alone)


@worlds
def test_parameters_that_some_ranks_leave_out_of_some_steps(algorithm, ranks_per_node):
    torch.manual_seed(4)
    model = Forked().double()
    alone = Alone(model, ADAMW)
    with init(algorithm, ranks_per_node) as world:
        optimizer = world.optimizer(model, ADAMW)
        for step in range(4):
            inputs, targets = samples(12, seed=step)
            parts = list(
                zip(inputs.chunk(world.size), targets.chunk(world.size), range(RANKS), strict=True)
            )

            def loss_on(model, x, y, rank, step=step):
                branch = step % 2 == 1 and rank % 2 == 0
                return functional.cross_entropy(model(x, branch), y)

            alone.step(sum(loss_on(alone.model, *part) for part in parts) / world.size)
            loss_on(model, *parts[world.rank]).backward()
            if step > 1:  # a collective between, where ranks differ in what they have launched
                optimizer.synchronize()
                assert world.gather(world.rank) == list(range(RANKS))
            optimizer.step()
            optimizer.zero_grad()
        assert_parity(world, model, alone)


def test_tied_and_frozen_parameters():
    torch.manual_seed(5)
    model = LanguageModel().double()
    alone = Alone(model, ADAMW)
    frozen = model.norm.weight.clone()
    generator = torch.Generator().manual_seed(6)
    tokens = [torch.randint(11, (n, 2), generator=generator) for n in (9, 4, 3)]
    with init() as world:
        optimizer = world.optimizer(model, ADAMW)
        for batch, global_batch in zip(world.shard(tokens), tokens, strict=True):
            alone.step(loss_of(alone.model, global_batch.unbind(1)))
            loss_of(model, batch.unbind(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_parity(world, model, alone)
    assert torch.equal(model.norm.weight, frozen)


@pytest.mark.parametrize("bucket_mb", [1e-6, 25])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_empty_and_scalar_parameters(algorithm, bucket_mb):
    torch.manual_seed(7)
    model = WithEmpty().double()
    alone = Alone(model, SGD)
    with init(algorithm, bucket_mb=bucket_mb) as world:
        optimizer = world.optimizer(model, SGD)
        for step in range(2):
            batch = samples(12, seed=step)
            alone.step(loss_of(alone.model, batch))
            loss_of(model, mine(world, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_parity(world, model, alone)


@pytest.mark.parametrize("bucket_mb", [SMALL, 25])
def test_parameters_of_two_dtypes(bucket_mb):
    torch.manual_seed(8)
    model = Mixed()
    alone = Alone(model, SGD)
    with init(bucket_mb=bucket_mb) as world:
        optimizer = world.optimizer(model, SGD)
        for step in range(3):
            inputs, targets = samples(12, seed=step)
            batch = inputs.float(), targets
            alone.step(loss_of(alone.model, batch))
            loss_of(model, mine(world, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        # A bf16 number has 8 bits: the roundings of gradients are seen, not those of sums alone.
        assert_parity(world, model, alone, tolerance=1e-2)
