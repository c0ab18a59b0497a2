"""Hyperparameters, gradients and counts of steps, which ranks must have in common."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from models import net
from mpi4py import MPI
from oracle import (
    ADAMW,
    SGD,
    SMALL,
    PlainTraining,
    assert_close,
    assert_parity,
    loss_of,
    mine,
    samples,
    update,
)
from torch import nn
from torch.nn.utils import clip_grad_norm_
from worlds import RANKS, SIDES
from worlds import refusal as refused_by_all

from mntrain.errors import AgreedError
from mntrain.sync import LocalSGD
from zero import comparison

pytestmark = pytest.mark.simulated

RANK = MPI.COMM_WORLD.rank
LAST = RANKS - 1
ODD = RANK == LAST
OTHER = "differs between ranks: rank 0 has"
stages = pytest.mark.parametrize("stage", [0, 1, 2])


@pytest.fixture
def world(worlds):
    return worlds(layout=1, bucket_mb=SMALL)


def loss(model, step=0):
    return loss_of(model, samples(12, seed=step + 100 * RANK))


def refusal(optimizer, model):
    """Return the words that a step raises on all ranks; nothing changes, and later ones go on."""
    optimizer.wait_for_parameters()
    before = copy.deepcopy(model.state_dict())
    words = refused_by_all(optimizer.step, error=RuntimeError)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    optimizer.zero_grad()
    return words


@stages
@pytest.mark.parametrize(
    ("key", "usual", "odd"),
    [
        ("lr", 0.1, 0.05),
        ("lr", torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.05, dtype=torch.float64)),
        ("betas", (0.9, 0.99), (0.9, 0.98)),
        ("maximize", False, True),
        ("note", "a", "b"),
    ],
    ids=["number", "tensor", "tuple", "bool", "text"],
)
def test_a_hyperparameter_that_differs_is_named(make, stage, key, usual, odd):
    model = net()
    first, *others = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [first]}, {"params": others, "note": "a", "nothing": math.nan}]
    optimizer = make(model, torch.optim.AdamW, groups=groups, stage=stage, foreach=False)
    for step in range(4):
        group = optimizer.param_groups[1]
        group[key] = odd if ODD and step == 2 else usual
        if step != 2:
            update(optimizer, loss(model, step))
            continue
        loss(model, step).backward()
        shown = [v.item() if isinstance(v, torch.Tensor) else v for v in (odd, usual)]
        found = refusal(optimizer, model)
        assert found.startswith(
            f"{key} in group 1 {OTHER} {shown[1]}, rank {LAST} has {shown[0]}: change"
        )


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda p: setattr(p, "grad", None), f"p.grad of wide.weight {OTHER} one, "),
        (lambda p: p.grad.mul_(1.02), f"the gradient of wide.weight {OTHER} "),
        (lambda p: setattr(p, "grad", torch.full_like(p, math.nan)), f"rank {LAST} has nan: do "),
        (lambda p: p.grad[1:].zero_(), f"the gradient of wide.weight {OTHER} "),
    ],
    ids=["none", "scaled", "not a number", "masked"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_gradient_that_one_rank_changes_is_named(make, act, words, dtype):
    torch.manual_seed(1)
    model = nn.ModuleDict({"wide": nn.Linear(40, 30), "small": nn.Linear(30, 1)}).to(dtype)
    optimizer = make(model, SGD, non_finite="skip")
    for step in range(3):
        x = torch.ones(2, 40, dtype=dtype)
        model["small"](model["wide"](x * (1 + RANK)).tanh()).sum().backward()
        if step == 1 and ODD:
            act(model["wide"].weight)
        if step == 1:
            assert words in (found := refusal(optimizer, model))
            assert f"rank {LAST} has" in found
            continue
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("stage", "kind"), [(1, "all"), (1, "one"), (2, "all"), (2, "one"), (2, "under no_sync")]
)
def test_a_sent_gradient_that_one_rank_drops_is_an_error_in_the_next_backward(
    world, make, stage, kind
):
    model = net()
    optimizer, alone = make(model, SGD, stage=stage), PlainTraining(model, SGD)
    with optimizer.no_sync() if kind == "under no_sync" else nullcontext():
        loss(model).backward()
    if ODD and kind == "one":
        next(model.parameters()).grad = None
    elif ODD:
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"dropped on some ranks alone.*on all ranks or on none"):
        loss(model, step=1).backward()
    optimizer.zero_grad()  # on all
    batch = samples(12)
    update(optimizer, loss_of(model, mine(world, batch)))
    alone.step(loss_of(alone.model, batch))
    assert_parity(world, model, alone)


@stages
@pytest.mark.parametrize("call", ["scale_gradients_", "clip_grad_norm_"])
def test_a_factor_of_the_gradient_that_differs_is_named(make, stage, call):
    model = net()
    optimizer = make(model, SGD, stage=stage)
    for step in range(4):
        loss(model, step).backward()
        # A limit that is above the norm changes nothing, on any rank.
        getattr(optimizer, call)(1e-3 * (1 + (ODD and step % 2)))
        optimizer.clip_grad_norm_(1e9 + RANK)
        if step == 1:
            found = refusal(optimizer, model)
            assert found.startswith(f"the factor of clip_grad_norm_ and scale_gradients_ {OTHER} ")
            assert f", rank {LAST} has " in found
            continue
        if step == 3:
            optimizer.zero_grad()  # drops what differs
            loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_limit_of_each_rank_that_one_alone_sets_is_named(make, stage):
    model = net()
    optimizer = make(model, SGD, stage=stage)
    if ODD:
        optimizer.clip_each_rank(0.5)
    loss(model).backward()
    words = f"the max_norm of clip_each_rank {OTHER} None, rank {LAST} has 0.5: "
    assert refusal(optimizer, model).startswith(words)


# What one rank alone does to a model or an optimizer, and what is said.
ALONE = {
    "weights": (
        lambda model, _: model[0].weight.data.copy_(torch.ones(16, 5)),
        f"after step 2, the weights differ between ranks: {SIDES}, first in 0.weight",
    ),
    "freeze": (
        lambda model, _: model[0].bias.requires_grad_(False),
        f"requires_grad of 0.bias {OTHER} True, rank {LAST} has False: ",
    ),
    "another state": (
        lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict() | {"steps": 7}),
        f"the optimizer's number of steps {OTHER} 2, rank {LAST} has 7: call",
    ),
    "a gradient": (
        lambda model, _: setattr(model[0].weight, "grad", None),
        f"p.grad of 0.weight {OTHER} one, rank {LAST} has none: ",
    ),
    "a key": (
        lambda _, optimizer: optimizer.param_groups[0].update(warm=3),
        f"warm in group 0 {OTHER} nothing, rank {LAST} has 3: ",
    ),
    "the same state": (
        lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        f"the number of loaded states {OTHER} 0, rank {LAST} has 1: call optimizer.load_state",
    ),
}


@stages
@pytest.mark.parametrize("name", ALONE)
def test_what_one_rank_alone_changes_is_named(make, stage, name):
    act, words = ALONE[name]
    model = net()
    optimizer = make(model, SGD, stage=stage)
    for step in range(2):
        update(optimizer, loss(model, step))
    optimizer.wait_for_parameters()
    loss(model).backward()
    if ODD:
        act(model, optimizer)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    found = str(error.value)
    assert words in found
    assert MPI.COMM_WORLD.allgather(found) == [found] * RANKS


def test_weights_of_unlike_processors_are_compared_no_more(make, monkeypatch):
    monkeypatch.setattr(comparison, "processor", lambda device: f"kind {RANK}")
    model = net()
    optimizer = make(model, SGD, check_every=1)
    for step in range(3):
        loss(model, step).backward()
        if ODD:
            for parameter in model.parameters():
                parameter.data.mul_(1 + 2**-10)
        told = RANK == 0 and step == 0
        with pytest.warns(UserWarning, match="not alike") if told else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer.weight_checks[0] == 1


class Centres(nn.Module):
    """Has buffers that a forward changes in every way, and one that is a constant."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 3).double()
        self.register_buffer("latest", None)
        for name in ("kept", "mean", "data", "fresh", "counts", "constant"):
            kind = {"dtype": torch.int64 if name == "counts" else torch.float64}
            self.register_buffer(name, torch.zeros(5, **kind), persistent=name == "kept")

    def forward(self, x):
        if self.training:
            mean = x.mean(0).detach()
            for buffer in (self.kept, self.mean, self.data.data):
                buffer.lerp_(mean, 0.5)
            self.fresh, self.latest = self.fresh + mean, mean
            self.counts += len(x) + RANK
        return self.out(x - self.mean)


@stages
def test_buffers_are_rank_0s_after_a_step_or_a_skipped_one_in_the_state_dict_or_not(
    world, make, stage
):
    model = Centres()
    optimizer = make(model, SGD, stage=stage, non_finite="skip")
    model.constant.fill_(RANK)
    for step in range(5):
        model.train(step < 4)
        (loss(model, step) * (math.inf if step == 2 else 1.0)).backward()
        first = world.gather({name: buffer.tolist() for name, buffer in model.named_buffers()})[0]
        assert optimizer.step().skipped == (step == 2)
        optimizer.zero_grad()
        assert {name: buffer.tolist() for name, buffer in model.named_buffers()} == first
        assert optimizer._comparison.constant == (step == 4)  # then nothing is sent


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_changes_in_forward_is_refused(make, layer):
    model = nn.Sequential(layer(7, 4, max_norm=1.0))
    with pytest.raises(AgreedError, match=r"^model\.0 is of type Embedding(Bag)? with max_norm"):
        make(model, SGD)


@pytest.mark.parametrize("layer", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)])
def test_a_model_whose_tensors_have_no_shape_yet_is_refused(make, layer):
    with pytest.raises(AgreedError, match=r"^model\.1 is a Lazy.* no shape yet: run a forward of"):
        make(nn.Sequential(nn.Linear(3, 2), layer), SGD)


@stages
def test_what_all_ranks_do_alike_is_allowed(world, make, stage):
    model = net()
    alone = PlainTraining(model, ADAMW, 0.05)
    optimizer = make(model, ADAMW, stage=stage, non_finite="skip")
    schedulers = [
        torch.optim.lr_scheduler.ReduceLROnPlateau(each, patience=0, threshold=0.5)
        for each in (alone.optimizer, optimizer)
    ]
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(4):
        batch = samples(12, seed=step)
        if step == 2:  # a step that all ranks skip
            factor = math.inf if ODD else 1.0
            assert update(optimizer, loss_of(model, mine(world, batch)) * factor).skipped
            continue
        norm = alone.step(loss_of(alone.model, batch))
        loss_of(model, mine(world, batch)).backward()
        if stage == 0:
            assert float(clip_grad_norm_(trained, 0.05)) == pytest.approx(norm, rel=1e-10)
        else:
            optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step(norm)
    optimizer.wait_for_parameters()
    assert_parity(world, model, alone)
    assert optimizer.param_groups[0]["lr"] == alone.optimizer.param_groups[0]["lr"]


def test_nodes_that_train_alone_have_gradients_of_their_own_and_one_rate(make):
    model = net()
    optimizer = make(model, torch.optim.SGD, lr=0.1, sync=LocalSGD(every=2), overlap_forward=False)
    for step in range(4):
        update(optimizer, loss(model, step))
    optimizer.param_groups[0]["lr"] = 0.05 if ODD else 0.1
    update(optimizer, loss(model))
    said = f"lr in group 0 {OTHER} 0.1, rank {LAST} has 0.05: "
    with pytest.raises(RuntimeError, match=said):  # in the exchange
        update(optimizer, loss(model))


class CountsByGroup(torch.optim.Optimizer):
    """Counts steps by group, and passes over a group of which it updates nothing."""

    looks_at = "params"

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            having = [p for p in group["params"] if p.grad is not None]
            if not (having if self.looks_at == "grads" else group["params"]):
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in having:
                parameter.sub_(parameter.grad, alpha=group["lr"] / group["step"])


class CountsGradients(CountsByGroup):
    looks_at = "grads"


@pytest.mark.parametrize("kind", [CountsByGroup, CountsGradients])
@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize("stage", [1, 2])
def test_steps_that_are_counted_by_group_are_those_of_one_process(make, stage, partition, kind):
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(5, 4, bias=False), nn.Linear(1, 1), nn.Linear(3, 2)]).double()
    plain = copy.deepcopy(model)

    def groups_of(model):
        return [{"params": list(part.named_parameters())} for part in model]

    def run(model, optimizer, steps):
        for step in steps:
            total = model[0](torch.full((1, 5), 1.0 + step, dtype=torch.float64)).sum()
            if step % 2:  # else the second group has no gradients at all
                total = total + model[1](torch.ones(1, 1, dtype=torch.float64)).sum()
            total = total + model[2].weight.sum() * step + (model[2].bias.sum() if step > 2 else 0)
            update(optimizer, total)

    def assert_alike(optimizer, model):
        counts = [group.get("step") for group in optimizer.param_groups]
        assert counts == [group.get("step") for group in alone.param_groups]
        assert_close(model, plain, 1e-12)

    alone = kind([{"params": [p for _, p in g["params"]]} for g in groups_of(plain)])
    options = {"stage": stage, "partition": partition, "overlap_forward": False}
    optimizer = make(model, kind, groups=groups_of(model), **options)
    for steps in (range(1, 2), range(2, 3), range(3, 7)):
        run(model, optimizer, steps)
        run(plain, alone, steps)
        assert_alike(optimizer, model)
    saved = optimizer.state_dict()
    slices = [s for part in MPI.COMM_WORLD.allgather(list(saved["slices"])) for s in part]
    resumed = copy.deepcopy(model)
    other = make(resumed, kind, groups=groups_of(resumed), stage=0)
    other.load_state_dict({**saved, "slices": slices})
    run(resumed, other, range(7, 9))
    run(plain, alone, range(7, 9))
    assert_alike(other, resumed)
