"""`zero.ZeroOptimizer` over `zero.TorchCollectives`, beside plain torch in every process, and DDP.

export PYTHONPATH=tests/helpers:tests/mpi
python -m torch.distributed.run --nproc-per-node 3 tests/torchrun/scripts/zero_training.py
mpirun -n 3 python tests/torchrun/scripts/zero_training.py      over backend mntrain
"""

import copy
import io
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from models import MODELS, Fickle, loss_at, net
from oracle import (
    ADAMW,
    EXACT,
    MAX_NORM,
    OWN,
    SGD,
    SHARED,
    STAGES,
    Pair,
    PlainTraining,
    assert_close,
    assert_parity,
    loss_of,
    mine,
    rows,
    samples,
    update,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import TorchWorld, run_tests

import zero
from zero.comm_hooks import CommHook
from zero.comm_hooks.between_nodes import Int8Hook
from zero.comm_hooks.ddp import DDPHook


def modes():
    return [{"stage": stage, "partition": partition} for stage, partition in STAGES]


def pair_of(world, model=None, kind=ADAMW, **options):
    return Pair(world, world.optimizer, net() if model is None else model, kind, **options)


def test_every_stage_equals_one_process(world):
    kinds = itertools.cycle([SGD, ADAMW])
    limits = itertools.cycle([float("inf"), MAX_NORM, MAX_NORM])
    buckets = itertools.cycle([OWN, SHARED])
    for mode, name in itertools.product(modes(), MODELS):
        kind, limit, bucket_mb = next(kinds), next(limits), next(buckets)
        options = {"max_grad_norm": limit, "bucket_mb": bucket_mb, **mode}
        both = pair_of(world, MODELS[name](), kind, **options)
        for step in range(3):
            shares = zip(*(column.chunk(world.size) for column in samples(12, step)), strict=True)
            parts = [[rows(share, 0, 1), rows(share, 1, None)] for share in shares]
            sum(
                loss_at(both.alone.model, part, step, rank) * len(part[1]) / 12
                for rank, share in enumerate(parts)
                for part in share
            ).backward()
            *first, last = parts[world.rank]
            for part in (*first, last):
                with nullcontext() if part is last else both.optimizer.no_sync():
                    loss = loss_at(both.model, part, step, world.rank)
                    both.optimizer.backward(loss, len(part[1]))
            result, norm = both.update()
            tolerance = 3e-6 if name == "mixed" else EXACT
            assert result.weight == 12
            assert result.grad_norm == pytest.approx(norm, rel=10 * tolerance), (mode, name)
        both.check(tolerance)


def test_every_stage_equals_ddp(world):
    for mode in modes():
        model, group = net(), dist.new_group()
        ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        theirs = ADAMW(ddp.parameters())
        ours = world.optimizer(model, ADAMW, overlap_forward=True, **mode)
        for step in range(4):
            batch = mine(world, samples(12, step))
            loss_of(ddp, batch).backward()
            norm = nn.utils.clip_grad_norm_(ddp.parameters(), MAX_NORM)
            theirs.step()
            theirs.zero_grad()
            loss_of(model, batch).backward()
            torch.testing.assert_close(ours.clip_grad_norm_(MAX_NORM), norm, rtol=EXACT, atol=0)
            ours.step()
            ours.zero_grad()
        ours.wait_for_parameters()
        assert_close(model, ddp.module)


def test_addends_travel_in_16_bits(world):
    for make_hook in (lambda: CommHook(torch.bfloat16), lambda: DDPHook(None, bf16_compress_hook)):
        for mode in modes():
            model = net(torch.float32)
            alone = PlainTraining(model, SGD)
            optimizer = world.optimizer(model, SGD, comm_hook=make_hook(), **mode)
            for step in range(3):
                batch = samples(12, step, torch.float32)
                alone.step(loss_of(alone.model, batch))
                update(optimizer, loss_of(model, mine(world, batch)))
            assert_parity(world, model, alone, 0.02)


def test_the_state_goes_to_plain_torch_and_back_and_to_other_stages(world):
    for mode, other in zip(modes(), reversed(modes()), strict=True):
        both = pair_of(world, **mode)
        both.train(0, 1)
        saved = io.BytesIO()
        torch.save(both.optimizer.full_state_dict(), saved)
        plain = both.alone.optimizer.state_dict()["state"]
        saved.seek(0)
        state = torch.load(saved)
        for number, entry in plain.items():
            for key, value in entry.items():
                torch.testing.assert_close(
                    state["state"][number][key], value, rtol=EXACT, atol=EXACT
                )
        both.optimizer.close()
        both.optimizer = world.optimizer(both.model, ADAMW, **other)
        both.optimizer.load_state_dict(state)
        both.train(2)
        own = copy.deepcopy({**both.optimizer.state_dict()}) if other["stage"] == 0 else None
        both.check()
        if own is not None:
            both.optimizer.load_state_dict(own)
            both.train(3)
            both.check()


def test_a_model_starts_with_the_tensors_of_rank_0(world):
    for stage in (0, 1, 2):
        torch.manual_seed(10 + world.rank)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        model[2].bias.requires_grad_(False)
        optimizer = world.optimizer(model, ADAMW, stage=stage)
        for step in range(2):
            update(optimizer, loss_of(model, mine(world, samples(12, step))))
        state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        assert world.gather(state) == [state] * world.size


def test_ranks_with_different_optimizers_are_told_so(world):
    last = world.size - 1
    for model, options, words in [
        (nn.Linear(5, 3 + (world.rank == last)), {}, "tensor 0 differs .* rank 0 has weight"),
        (nn.Linear(5, 3), {"stage": int(world.rank == last)}, "stage differs .* rank 0 has 0,"),
        (nn.Linear(5, 3, bias=world.rank < last), {}, "tensor 1 differs .* bias .* has nothing"),
    ]:
        if world.size > 1:
            with pytest.raises(ValueError, match=words) as error:
                world.optimizer(model, ADAMW, **options)
            assert set(world.gather(str(error.value))) == {str(error.value)}


def test_what_needs_nodes_or_is_distributed_is_refused(world):
    if world.size > 1:
        with pytest.raises(ValueError, match=r"needs `levels`: world\.optimizer gives them"):
            world.optimizer(net(), ADAMW, comm_hook=Int8Hook())
    model = net()
    with pytest.raises(ValueError, match="leave out model="):
        zero.ZeroOptimizer(model, ADAMW, zero.TorchCollectives(), model=model)
    with pytest.raises(ValueError, match="model is wrapped in DistributedDataParallel"):
        world.optimizer(DistributedDataParallel(model), ADAMW)


def test_one_backward_fills_the_buckets_of_two_optimizers_in_any_order(world):
    model = Fickle().double()
    alone = [PlainTraining(model, SGD, groups=groups) for groups in (early, late)]
    alone[1].model = alone[0].model
    alone[1].optimizer = SGD(late(alone[0].model))
    optimizers = [
        world.optimizer(model, SGD, groups=groups(model), bucket_mb=OWN, stage=stage)
        for stage, groups in enumerate((early, late))
    ]
    for step in range(4):
        shares = list(zip(*(c.chunk(world.size) for c in samples(12, step)), strict=True))
        losses = [loss_at(alone[0].model, s, step, rank) for rank, s in enumerate(shares)]
        (sum(losses) / world.size).backward()
        for one in alone:
            one.update()
        loss = loss_at(model, shares[world.rank], step, world.rank)
        dist.all_reduce(loss.detach())
        loss.backward()
        for optimizer in optimizers if step % 2 else reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
    assert_parity(world, model, alone[0])


def early(model):
    return [p for name, p in model.named_parameters() if name.startswith(("first", "somewhere"))]


def late(model):
    return [p for p in model.parameters() if all(p is not one for one in early(model))]


def test_a_part_of_the_ranks_trains_alone(world):
    part = list(range(world.size))[1:] or [0]
    group = dist.new_group(part)
    if world.rank in part:
        for mode in modes():
            both = pair_of(TorchWorld(group), **mode)
            both.train(0, 1)
            both.check()


def test_a_hook_of_ones_own_chains_collectives(world):
    class Halves(CommHook):
        def __call__(self, bucket):
            middle = len(bucket.gradients) // 2
            for half in (bucket.gradients[:middle], bucket.gradients[middle:]):
                bucket.collectives.all_reduce(half).wait()
            return zero.collectives.CompletedWork()

    both = pair_of(world, stage=2, comm_hook=Halves())
    both.train(0, 1)
    both.check()


if __name__ == "__main__":
    run_tests(globals())
