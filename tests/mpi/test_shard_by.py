"""Shards in proportion to the free memory of ranks give the weights of plain torch."""

import copy
import math
from contextlib import contextmanager
from functools import partial
from itertools import cycle

import pytest
import torch
from model_digest import model_digest
from models import Mixed, Tiny, net
from mpi4py import MPI
from oracle import (
    ADAMW,
    EXACT,
    MAX_NORM,
    OWN,
    SGD,
    SHARED,
    STAGES,
    Pair,
    assert_same_weights,
    init,
    train_in_fp32,
)
from states import SIZES, SubWorlds, assert_same_slices, empty_like, gather_slices, saved, train
from torch import nn
from worlds import DEALT, RANKS, refusal

from mntrain import checkpoint
from mntrain.checkpoint import Manifest, Saver
from mntrain.compression.int8 import Int8Hook
from mntrain.run import shard_sizes
from mntrain.sync import DiLoCo, SparseLoCo
from zero.comm_hooks import CommHook
from zero.layout import split_by_weight

pytestmark = pytest.mark.mpi(min_size=2)

RANK = MPI.COMM_WORLD.rank
# Free bytes by rank: very unequal, of one rank none or too little to matter; and less unequal.
FREE = [[90, 0, 7, 400][:RANKS], [3, 900, 60, 0][:RANKS], [40, 100, 70, 85][:RANKS]]
sharded = pytest.mark.parametrize(
    "mode", [{"stage": s, "partition": p} for s, p in STAGES if s], ids=str
)


@contextmanager
def free_memory(free):
    """Let ranks have so many bytes free, by rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_sizes, "free_by_rank", lambda _, places: free[: len(places)])
        yield


def by_memory(world, model, kind, *, free, **options):
    """An optimizer whose shards are in proportion to free bytes."""
    with free_memory(free):
        return world.optimizer(model, kind, shard_by="memory", **options)


def weights_of(world, free):
    """The weights of shards, by slot."""
    return shard_sizes.weigh(free, [world.collectives.slot(rank) for rank in range(world.size)])


@pytest.mark.parametrize("free", FREE, ids=str)
@pytest.mark.parametrize(
    "where",
    [("lanes", 2, SHARED), ("naive", None, OWN), ("leader", (DEALT or [1])[-1], SHARED)],
    ids=str,
)
@sharded
def test_unequal_shards_equal_one_process(worlds, mode, where, free):
    torch.manual_seed(4)
    world, model = worlds(*where), Tiny().double()
    make = partial(by_memory, world, free=free)
    both = Pair(world, make, model, ADAMW, max_grad_norm=MAX_NORM, **mode)
    for result, norm in both.train(0, 1, 2):
        assert result.grad_norm == pytest.approx(norm, rel=1e-9)
        assert result.clip_coef == pytest.approx(MAX_NORM / (norm + 1e-6), rel=1e-9)
    optimizer, weights = both.optimizer, weights_of(world, free)
    held = world.gather(sum(slice.high - slice.low for slice in optimizer.slices()))
    optimizer.close()
    both.check()
    assert sum(held) == sum(parameter.numel() for parameter in model.parameters())
    for rank, numel in enumerate(held):
        weight = weights[world.collectives.slot(rank)]
        if mode["partition"] == "element":  # within an element of each bucket
            part = sum(held) * weight / sum(weights)
            assert abs(numel - part) <= len(optimizer._shard.plan)
        assert weight or not numel


def optimizer_of(world, model, kind=ADAMW, *, free, **options):
    """Shards in proportion to free bytes; of None, equal ones."""
    if free is None or world.size == 1:
        return world.optimizer(model, kind, **options)
    return by_memory(world, model, kind, free=free[: world.size], **options)


def bits(world, stage, free=None, *, limit=math.inf, **options):
    """Train a model in fp32, by shards of some weights; return the results and all weights."""
    make = partial(optimizer_of, world, free=free)
    return train_in_fp32(world, ADAMW, make=make, stage=stage, max_grad_norm=limit, **options)


@pytest.mark.parametrize("algorithm", ["lanes", "flat"])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_the_cut_changes_no_bit_of_an_unclipped_step(worlds, algorithm, wire):
    train_bits = partial(bits, worlds(algorithm), comm_hook=CommHook(wire))
    first = train_bits(0)
    for stage, free in zip(cycle((1, 2)), (*FREE, [5] * RANKS), strict=False):
        found = train_bits(stage, free)
        assert_same_weights(found, first)
        for ours, theirs in zip(found[0], first[0], strict=True):
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)


def test_stages_clip_to_the_same_bits_by_the_same_cut(worlds):
    clipped = partial(bits, worlds("lanes"), limit=MAX_NORM)
    for free in FREE:
        first, second = clipped(1, free), clipped(2, free)
        assert first[0] == second[0]
        assert all(result.clip_coef < 1 for result in first[0])
        assert_same_weights(first, second)
    equal = [clipped(1), clipped(1, [5] * RANKS)]
    assert equal[0][0] == equal[1][0]
    assert_same_weights(*equal)


@pytest.mark.parametrize("gather_dtype", ["fp32", "bf16"])
@sharded
def test_the_rank_with_the_most_memory_holds_the_most(mode, gather_dtype):
    with init(bucket_mb=SHARED, gather_dtype=gather_dtype) as world:
        for free in FREE:
            model = Mixed()  # with master weights
            optimizer = by_memory(world, model, ADAMW, free=free, **mode)
            train(world, model, optimizer, range(2))
            memory = optimizer.memory()
            optimizer.close()
            totals = world.gather(memory.master + memory.state)
            assert totals[free.index(max(free))] == max(totals) > min(totals)


def test_compressed_gradients_follow_exact_ones(worlds):
    world = worlds("lanes", 2)
    exact = bits(world, 1)
    found = bits(world, 1, FREE[0], comm_hook=Int8Hook())
    assert_same_weights(bits(world, 2, FREE[0], comm_hook=Int8Hook()), found)
    for name, tensor in found[1][-1].items():
        torch.testing.assert_close(tensor, exact[1][-1][name], rtol=0, atol=0.05)


SYNCS = [
    DiLoCo(every=2, warmup=1),
    SparseLoCo(every=2, warmup=1, density=1),
]


@pytest.mark.parametrize("sync", SYNCS, ids=lambda sync: type(sync).__name__)
@pytest.mark.parametrize("stage", [1, 2])
def test_nodes_that_exchange_rarely_have_equal_bounds(worlds, sync, stage):
    """The least free memory of a local rank counts on all nodes."""
    world = worlds("lanes", 2 if RANKS == 4 else 1)
    free = [30, 900, 60, 7] if RANKS == 4 else FREE[0]
    models = []
    for options in ({}, {"shard_by": "memory"}):
        model = net()
        with free_memory(free):
            optimizer = world.optimizer(model, ADAMW, stage=stage, sync=sync, **options)
        train(world, model, optimizer, range(7))
        optimizer.wait_for_parameters()
        models.append(model)
        if RANKS == 4 and options:
            bounds = [bucket.bounds for bucket in optimizer._shard.plan]
            weights = shard_sizes.weigh(
                [30, 7], [optimizer.schedule.sharding.slot(r) for r in (0, 1)]
            )
            assert bounds == [split_by_weight(stop, weights) for *_, stop in bounds]
            assert world.gather(bounds) == [bounds] * RANKS
        optimizer.exchange()
        assert len(set(world.gather(model_digest(model)))) == 1
        optimizer.close()
    if not isinstance(sync, SparseLoCo):  # its codes are of slices
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


def test_parameters_that_are_added_are_divided_alike(worlds):
    world = worlds("lanes")
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    for parameter in model.parameters():
        world.collectives.broadcast(parameter.detach().view(-1)).wait()
    model[0].requires_grad_(False)
    for partition in ("element", "parameter"):
        own = copy.deepcopy(model)
        make = partial(by_memory, world, free=FREE[0])
        both = Pair(world, make, own, SGD, stage=2, partition=partition)
        both.train(0)
        optimizer, weights = both.optimizer, weights_of(world, FREE[0])
        for trained in (own, both.alone.model):
            trained[0].requires_grad_(True)
        named = [(f"0.{name}", parameter) for name, parameter in own[0].named_parameters()]
        with free_memory([1] * RANKS):
            optimizer.add_param_group({"params": named, "lr": 0.05})
        params = list(both.alone.model[0].parameters())
        both.alone.optimizer.add_param_group({"params": params, "lr": 0.05})
        both.train(1, 2, 3)
        plan = optimizer._shard.plan
        optimizer.close()
        both.check()
        for bucket in plan:
            if partition == "element":
                assert bucket.bounds == split_by_weight(bucket.numel, weights)
            slot = weights.index(0)
            assert bucket.bounds[slot] == bucket.bounds[slot + 1]


@pytest.fixture(scope="module")
def sub_worlds():
    made = SubWorlds()
    yield made
    made.close()


DIVISIONS = [FREE[0], None, FREE[1]]  # None: equal


def test_a_checkpoint_of_one_division_is_read_by_others_at_any_size(sub_worlds, folder):
    for turn, written in enumerate(DIVISIONS):
        world, model, place = sub_worlds(RANKS), Mixed(), folder / str(turn)
        optimizer = optimizer_of(world, model, free=written, stage=1 + turn % 2)
        train(world, model, optimizer, range(2))
        if world.master:
            place.mkdir()
        Saver(world, model, optimizer, place, 3).save(
            Manifest(2, {"task": "none"}, samples=12, skipped_steps=0, eval_loss=None)
        )
        pieces, weights = saved(optimizer, model)
        optimizer.close()
        for size in SIZES:
            read = DIVISIONS[(turn + size) % len(DIVISIONS)]
            reader, other = sub_worlds(size), empty_like(Mixed())
            if reader is None:
                continue
            resumed = optimizer_of(reader, other, free=read, stage=1 + size % 2)
            checkpoint.load(checkpoint.newest(reader, place), other, resumed, reader)
            gathered = gather_slices(resumed)
            resumed.close()
            assert all(torch.equal(t, weights[name]) for name, t in other.state_dict().items())
            if reader.rank == 0:
                assert_same_slices(gathered, pieces)


def test_what_cannot_be_divided_is_refused(worlds, monkeypatch):
    world = worlds("lanes")
    said = refusal(world.optimizer, net(), SGD, stage=1, shard_by="disk")
    assert "shard_by 'disk' is unknown: choose equal or memory" in said
    said = refusal(world.optimizer, net(), SGD, shard_by="memory")
    assert "has no effect at stage 0: give stage=1 or 2" in said
    said = refusal(world.optimizer, net(), SGD, stage=1, shard_by=["equal", "memory"][RANK % 2])
    assert "shard_by differs between ranks" in said
    known = None if RANK == RANKS - 1 else 10**9
    monkeypatch.setattr(shard_sizes, "free_memory", lambda device: known)
    said = refusal(world.optimizer, net(), SGD, stage=1, shard_by="memory")
    assert f"rank {RANKS - 1}" in said
    assert "the free memory is unknown here" in said


def test_ranks_of_one_host_have_equal_shards(worlds):
    """The measured memory is divided by the ranks of the host, whatever each of them finds."""
    world = worlds("lanes", 2)
    optimizer = world.optimizer(net(), SGD, stage=1, shard_by="memory")
    equal = world.optimizer(net(), SGD, stage=1)
    assert optimizer._shard.plan == equal._shard.plan
    optimizer.close()
    equal.close()
