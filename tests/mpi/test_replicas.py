"""All ranks hold the same bits, take the same steps, and refuse together."""

import math
from functools import partial

import pytest
import torch
from mpi4py import MPI
from states import gather_slices
from torch import nn

import mntrain
from mntrain.train.model_digest import model_digest
from mntrain.train.optimization import weight_decay_groups
from zero import NonFiniteGradientError, SingleProcessCollectives, ZeroOptimizer

pytestmark = pytest.mark.mpi

RANK, RANKS = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = RANKS - 1
ALGORITHMS = ["naive", "flat", "leader", "lanes"]
SMALL = 1e-4  # MiB: a bucket for almost every parameter

ADAMW = partial(torch.optim.AdamW, lr=0.01)

init = partial(mntrain.init, device="cpu", bucket_mb=SMALL, ranks_per_node=2)


def net(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def inputs(seed):
    return torch.randn(3 + seed % 4, 4, generator=torch.Generator().manual_seed(seed))


def all_alike(world, value):
    return len(set(world.gather(value))) == 1


def test_training_starts_from_rank_0():
    model = net(seed=RANK)
    model[1].running_mean += RANK
    with init() as world:
        world.optimizer(model, ADAMW)
        assert world.gather(model_digest(model)) == [model_digest(net(seed=0))] * RANKS


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_after_every_step_all_ranks_have_the_same_bits(algorithm):
    model = net(seed=RANK)
    with init(algorithm=algorithm) as world:
        optimizer = world.optimizer(model, ADAMW, max_grad_norm=0.1)
        for step in range(4):
            x = inputs(seed=10 * step + RANK)
            optimizer.backward(model(x).square().mean(), weight=len(x))
            result = optimizer.step()
            optimizer.zero_grad()
            assert all_alike(world, model_digest(model))
            assert all_alike(world, result)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_repeats_to_the_bit(algorithm):
    def run():
        model = net()
        with init(algorithm=algorithm) as world:
            optimizer = world.optimizer(model, ADAMW, max_grad_norm=0.1)
            for step in range(4):
                model(inputs(seed=10 * step + RANK)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model_digest(model)

    assert run() == run()


def test_buffers_are_those_of_rank_0_after_a_step():
    model = net()
    with init() as world:
        optimizer = world.optimizer(model, ADAMW)
        for step in range(2):
            model(inputs(seed=10 * step + RANK)).square().mean().backward()
            before = world.gather([b.tolist() for b in model.buffers()])
            optimizer.step()
            optimizer.zero_grad()
            assert [b.tolist() for b in model.buffers()] == before[0]
        assert model[1].num_batches_tracked == 2


def test_buckets_leave_during_backward_whatever_the_groups():
    # Decay splits weights from biases; the first layer's bias must not hold up the last layer.
    launched = []
    model = net()
    with init() as world:
        optimizer = world.optimizer(model, ADAMW, groups=weight_decay_groups(model, 0.1))
        gradients = optimizer._shard.gradients
        launch = gradients.launched
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                gradients,
                "launched",
                lambda index, work: launched.append(index) or launch(index, work),
            )
            model[0].register_full_backward_pre_hook(lambda *_: launched.append("first layer"))
            model(inputs(seed=0).requires_grad_()).square().mean().backward()
            optimizer.step()
    assert launched.index("first layer") > 0


@pytest.mark.parametrize("where", [0, LAST])
def test_a_gradient_that_is_not_finite_on_one_rank_is_refused_by_all(where):
    model = net()
    with init() as world:
        optimizer = world.optimizer(model, ADAMW)
        before = [p.tolist() for p in model.parameters()]
        loss = model(inputs(seed=RANK)).square().mean()
        (loss + model[3].bias.sum() * (math.inf if where == RANK else 1.0)).backward()
        with pytest.raises(
            NonFiniteGradientError, match=rf"not finite in 3\.bias, on rank {where}$"
        ):
            optimizer.step()
        assert [p.tolist() for p in model.parameters()] == before

        optimizer.zero_grad()
        model(inputs(seed=RANK)).square().mean().backward()
        optimizer.step()
        assert all_alike(world, model_digest(model))


def test_a_step_without_a_sample_on_any_rank_is_refused_by_all():
    model = net()
    with init() as world:
        optimizer = world.optimizer(model, ADAMW)
        optimizer.share(0)
        with pytest.raises(ValueError, match="sum to 0:"):
            optimizer.step()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", [0, LAST])
def test_a_nan_on_a_rank_without_samples_does_no_harm(where):
    model = net()
    with init() as world:
        optimizer = world.optimizer(model, ADAMW)
        idle = where == RANK
        optimizer.share(0 if idle else 3)
        (model(inputs(seed=RANK)).square().mean() * (math.nan if idle else 1.0)).backward()
        result = optimizer.step()
        assert result.weight == 3 * (RANKS - 1)
        assert math.isfinite(result.grad_norm)
        assert all_alike(world, model_digest(model))


def test_groups_are_those_that_torch_takes():
    model = net()
    with init() as world:
        optimizer = world.optimizer(
            model,
            ADAMW,
            groups=[{"params": model[0].weight, "lr": 0.5}, {"params": model[3].parameters()}],
        )
        before = model[0].bias.clone()
        model(inputs(seed=RANK)).square().mean().backward()
        optimizer.step()
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
        assert torch.equal(model[0].bias, before)
        assert all_alike(world, model_digest(model))


def test_a_model_goes_on_in_another_world():
    model = net()
    for _ in range(2):
        with init() as world:
            optimizer = world.optimizer(model, ADAMW)
            model(inputs(seed=RANK)).square().mean().backward()
            optimizer.step()
            assert all_alike(world, model_digest(model))


@pytest.mark.parametrize(("setting", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_are_gathered_in_16_bits_are_rounded_alike(stage, setting, dtype):
    model, other = net(), net()
    alone = ZeroOptimizer(
        other.named_parameters(), ADAMW, SingleProcessCollectives(), stage=stage, gather_dtype=dtype
    )
    with init(gather_dtype=setting) as world:
        optimizer = world.optimizer(model, ADAMW, stage=stage)
        for seed in range(3):
            for trained, stepper in ((model, optimizer), (other, alone)):
                trained(inputs(seed=seed)).square().mean().backward()
                stepper.step()
                stepper.zero_grad()
        assert all_alike(world, model_digest(model))
        masters = {piece.name: piece for piece in gather_slices(optimizer)}
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, parameter.to(dtype).to(parameter.dtype))
            torch.testing.assert_close(parameter, other.get_parameter(name), rtol=2**-7, atol=1e-6)
            if world.master:
                master = masters[name].tensors["master"].view(parameter.shape)
                assert torch.equal(master.to(dtype).to(parameter.dtype), parameter)
        optimizer.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_frozen_parameters_are_those_of_rank_0(stage):
    model = net(seed=1 + RANK)
    expected = net(seed=1).state_dict()
    model[0].weight.requires_grad_(False)
    model[1].requires_grad_(False)
    with init() as world:
        world.optimizer(model, torch.optim.SGD, lr=0.1, stage=stage)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
