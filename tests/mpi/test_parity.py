"""Training on N ranks gives the weights of one process that sees the whole of every batch.

Every rank trains the oracle too, with plain torch. In fp64 a wrong weight of a sample, or a
gradient summed twice, is far above the tolerance; the order of sums is far below it.
"""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from models import Forked, LanguageModel, Mixed, WithEmpty, net
from mpi4py import MPI
from oracle import (
    ADAMW,
    ALGORITHMS,
    MAX_NORM,
    SGD,
    SMALL,
    Alone,
    assert_parity,
    init,
    loss_of,
    mine,
    rows,
    samples,
)
from sharding import sharded
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.mpi

RANKS = MPI.COMM_WORLD.size

worlds = pytest.mark.parametrize(
    ("algorithm", "ranks_per_node"), [("naive", None), ("flat", None), ("leader", 2), ("lanes", 2)]
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
        whole = sharded(loader(), seed=3)
        for _ in range(2):
            for batch, global_batch in zip(ours, whole, strict=True):
                norm = alone.step(loss_of(alone.model, global_batch))
                loss_of(model, batch).backward()
                result = optimizer.step()
                optimizer.zero_grad()
                assert result.weight == len(global_batch[1])
                assert result.grad_norm == pytest.approx(norm, rel=1e-10)
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
    model = Mixed(torch.float64, torch.float32)
    alone = Alone(model, SGD)
    with init(bucket_mb=bucket_mb) as world:
        optimizer = world.optimizer(model, SGD)
        for step in range(3):
            batch = samples(12, seed=step)
            alone.step(loss_of(alone.model, batch))
            loss_of(model, mine(world, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        # The fp32 layer rounds sums, and those roundings reach the others.
        assert_parity(world, model, alone, tolerance=3e-6)
