"""Gradients as backward hands them over: whose memory they lie in, their norm, and whose is odd."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from first_of_two import STAGES, WORLDS, FirstOfTwo, zero
from torch import nn

from zero import SingleProcessCollectives
from zero.kernels import RUN, nan_unless_finite, power_sum


class Sums(nn.Module):
    """A loss of several parameters of one shape, and of a few others, made by a function."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
        self.c = nn.Parameter(torch.randn(12))
        self._loss = loss

    def forward(self):
        return self._loss(self.a, self.b, self.c)


X = torch.linspace(-1, 1, 12).view(3, 4)
LOSSES = {
    # Backward gives both parameters the very same tensor, or views of one memory.
    "one tensor": lambda a, b, c: ((a + b) * X).sum() + c.sum(),
    "one memory": lambda a, b, c: ((a.flatten() + b.flatten() + c) * X.flatten()).sum(),
    "parts of one memory": lambda a, b, c: (torch.cat([a, b]) * torch.cat([X, -X])).sum() + c[0],
    # One that does not lie in memory as its parameter does.
    "expanded": lambda a, b, c: a.sum() + 2 * b.sum() + c.mean(),
    "transposed": lambda a, b, c: (a.t() * X.view(4, 3)).sum() + (b * X).sum() + c.sum(),
    "a row": lambda a, b, c: (a[1] * X[0]).sum() + b[:, 2].sum() + c[3],
}


def both(loss, **options):
    """The weights after two steps of three micro-batches, here and in plain torch."""
    mine = Sums(loss)
    theirs = copy.deepcopy(mine)
    optimizer = zero(mine, lr=0.1, **options)
    limit = options.get("max_grad_norm", math.inf)
    for step in range(2):
        for turn in range(3):
            if turn < 2:
                with optimizer.no_sync():
                    mine().backward()
            else:
                mine().backward()
        result = optimizer.step()
        optimizer.zero_grad()
        # Not by torch's own accumulation, which adds in place to what two parameters may share.
        parameters = list(theirs.parameters())
        gradients = [3 * g for g in torch.autograd.grad(theirs(), parameters)]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        assert result.grad_norm == pytest.approx(norm, rel=1e-6)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.sub_(g, alpha=0.1 * min(1.0, limit / norm))
        assert step == 0 or result.clip_coef < 1 or limit == math.inf
    return mine, theirs


@pytest.mark.parametrize("limit", [math.inf, 0.5])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@STAGES
def test_gradients_that_share_memory_or_lie_otherwise_count_once(stage, loss, limit):
    mine, theirs = both(loss, stage=stage, max_grad_norm=limit)
    for ours, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)


@STAGES
def test_a_gradient_that_begins_within_the_memory_of_another_counts_once(stage):
    torch.manual_seed(1)
    shapes = {"a": (2, 3), "b": (3,), "c": (3,)}
    named = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = zero(list(named.items()), stage=stage, lr=1.0, max_grad_norm=0.5)
    x = torch.randn(6)
    both = torch.cat([named["b"], named["c"]])
    ((named["a"].view(-1) + both) * x).sum().backward()
    coef = optimizer.step().clip_coef
    assert coef < 1
    for name, gradient in {"a": x.view(2, 3), "b": x[:3], "c": x[3:]}.items():
        torch.testing.assert_close(named[name].detach(), before[name] - coef * gradient)


def loss_with_graph():
    """A model whose gradient depends on its weights."""
    return Sums(lambda a, b, c: (a * b).square().sum() + c.square().sum())


CREATES = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # with create_graph


@CREATES
@STAGES
def test_a_gradient_with_a_graph_of_its_own_trains(stage):
    model = loss_with_graph()
    other = copy.deepcopy(model)
    optimizer = zero(model, stage=stage, lr=0.1, max_grad_norm=0.1)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    model().backward(create_graph=True)
    optimizer.step()
    other().backward()
    nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    plain.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@CREATES
@pytest.mark.parametrize("again", [False, True])
@STAGES
def test_a_penalty_of_a_mean_that_has_no_graph_is_refused_with_what_has_one(stage, again):
    model = loss_with_graph()
    optimizer = zero(model, world=FirstOfTwo, stage=stage, lr=0.1)
    with optimizer.no_sync():
        model().backward(create_graph=True)
    loss = model()
    loss.backward(create_graph=True)
    words = r"torch\.autograd\.grad\(.*create_graph=True\)" if stage == 0 else "or stage 0"

    def penalize():
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        optimizer.zero_grad()
        # Computed again, backward comes to the loss first.
        ((model() if again else loss) + penalty).backward()

    with pytest.raises(RuntimeError, match=words):
        penalize()
    if again:
        return
    optimizer.zero_grad(set_to_none=False)
    loss, parameters = model(), [*model.parameters()]
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()
    assert stage > 0 or not any(p.grad.requires_grad for p in parameters)
    assert optimizer.step().grad_norm > 0


@CREATES
@WORLDS
@STAGES
def test_a_graph_of_other_gradients_than_means_may_be_used(stage, world):
    model, x = loss_with_graph(), torch.tensor(2.0, requires_grad=True)
    other = copy.deepcopy(model)
    optimizer = zero(model, world=world, stage=stage, lr=0.1)
    for each in (model, other):
        x.grad = None
        (each() * x**2).backward(create_graph=True)
        loss = x.grad.square()  # a penalty of the gradient of an input
        (optimizer if each is model else each).zero_grad()
        loss.backward()
    assert optimizer.step().grad_norm > 0
    if stage == 0 or world is SingleProcessCollectives:
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 2**0.5), (torch.bfloat16, None), (torch.bfloat16, 2**0.5)],
)
@STAGES
def test_gradients_outlive_a_step_until_zero_grad(stage, dtype, limit):
    model = nn.Linear(4, 4, bias=False).to(dtype)
    optimizer = zero(model, world=FirstOfTwo, stage=stage, lr=0.0, max_grad_norm=limit)
    # A gradient of ones. This rank's half has a norm of 8 ** 0.5, and nobody adds the other's.
    clipped, own = (0.5, slice(0, 4 if stage == 0 else 2)) if limit else (1.0, slice(0, 2))
    for expected in (clipped, clipped + 1.0):
        model(torch.eye(4, dtype=dtype)).sum().backward()
        if expected == clipped:
            optimizer.step()
        gradient = optimizer.full_gradient(model.weight)[own]
        torch.testing.assert_close(gradient, torch.full_like(gradient, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@STAGES
def test_a_clipped_gradient_of_one_rank_outlives_a_step_as_in_torch(stage, dtype):
    model = nn.Linear(4, 4).to(dtype)
    other = copy.deepcopy(model)
    optimizer = zero(model, stage=stage, lr=0.0, max_grad_norm=1.0)
    for turn in range(3):
        x = torch.full((2, 4), 2.0**-turn, dtype=dtype)
        model(x).sum().backward()
        optimizer.step()
        other(x).sum().backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


# The norm.


def norm(*shards, p=2.0):
    return math.pow(float(power_sum(shards, p)), 1 / p)


def exact(*shards, p=2.0):
    return math.pow(sum(float(s.double().abs().pow(p).sum()) for s in shards), 1 / p)


LENGTHS = [1, 17, RUN - 1, RUN, RUN + 1]


DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)


@DTYPES
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_a_norm_is_that_of_fp64(p, dtype):
    torch.manual_seed(2)
    shards = [torch.randn(n).to(dtype) for n in LENGTHS]
    by_rows = p == 2 and dtype == torch.float32  # of which squares are summed in fp32
    tolerance = 1e-8 if by_rows else 1e-12
    assert norm(*shards, p=p) == pytest.approx(exact(*shards, p=p), rel=tolerance)
    assert norm(p=p) == norm(torch.zeros(0), p=p) == norm(torch.zeros(1000), p=p) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@DTYPES
def test_what_is_not_finite_is_seen_whatever_comes_after(dtype, value):
    largest = torch.finfo(dtype).max
    odd = torch.ones(1000, dtype=dtype)
    odd[321] = value
    flag = nan_unless_finite(torch.ones(5))
    flag += nan_unless_finite(torch.full((1000,), largest, dtype=dtype))  # their sum overflows
    assert flag == 0
    flag += nan_unless_finite(odd) + nan_unless_finite(torch.ones(5))
    assert flag != 0
    assert not math.isfinite(norm(odd))


@pytest.mark.thorough
@pytest.mark.parametrize(("world", "stage"), [(SingleProcessCollectives, 0), (FirstOfTwo, 2)])
def test_compiled_autograd_is_refused_by_its_name(world, stage):
    torch.compiler.reset()
    model = nn.Linear(3, 2)
    optimizer = zero(model, world=world, stage=stage, lr=0.1)

    def train_step(x):
        model(x).sum().backward()
        optimizer.step()

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(train_step, backend="eager")
        with pytest.raises(RuntimeError, match=r"dynamo\.config\.compiled_autograd is on: "):
            compiled(torch.ones(2, 3))
    optimizer.close()
    torch.compiler.reset()


USES = {
    "read": lambda p: p.grad.norm(),
    "changed": lambda p: p.grad.clamp_(-1, 1),
    "added to": lambda p: p.grad.add_(1.0),
    "replaced": lambda p: setattr(p, "grad", 2 * p.grad),
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@STAGES
def test_a_hook_behind_accumulation_has_the_gradient_at_stage_0_and_in_no_micro_batch_else(
    stage, use, early
):
    model, outcomes = nn.Linear(2, 1), []

    def hook(parameter):
        try:
            use(parameter)
            outcomes.append("")
        except RuntimeError as error:
            outcomes.append(str(error))

    if early:
        model.weight.register_post_accumulate_grad_hook(hook)
    optimizer = zero(model, world=FirstOfTwo, stage=stage, partition="parameter", lr=0.1)
    if not early:
        model.weight.register_post_accumulate_grad_hook(hook)
    for turn in range(4):  # the last one behind means that are held
        with nullcontext() if turn > 1 else optimizer.no_sync():
            model(torch.ones(1, 2)).sum().backward()
    assert len(outcomes) == 4
    assert all(("is sharded over ranks" in words) == (stage > 0) for words in outcomes)
    if stage:
        assert optimizer.full_gradient(model.weight).tolist() == [[4.0, 4.0]]


SETS = {
    "dropped": lambda p: setattr(p, "grad", None),
    "assigned": lambda p: setattr(p, "grad", torch.ones_like(p)),
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("use", SETS.values(), ids=SETS)
@STAGES
def test_a_hook_that_sets_a_gradient_without_reading_it_trains_as_in_torch_or_is_refused(
    stage, use, early
):
    model, alone = nn.Linear(2, 1), nn.Linear(2, 1)
    alone.load_state_dict(model.state_dict())
    if early:
        model.weight.register_post_accumulate_grad_hook(use)
    optimizer = zero(model, world=FirstOfTwo, stage=stage, lr=0.1, weight_decay=0.5)
    if not early:
        model.weight.register_post_accumulate_grad_hook(use)
    if stage:
        with pytest.raises(RuntimeError, match=r"^a hook has set the gradient of weight in back"):
            model(torch.ones(1, 2)).sum().backward()
        return
    alone.weight.register_post_accumulate_grad_hook(use)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, weight_decay=0.5)
    for turn in range(3):
        for net, syncs in ((model, optimizer.no_sync), (alone, nullcontext)):
            with nullcontext() if turn else syncs():
                net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    plain.step()
    assert torch.equal(model.weight, alone.weight)


@STAGES
def test_a_step_within_a_backward_is_refused_on_several_ranks(stage):
    model = nn.Linear(2, 1)
    optimizers = [
        zero([named], world=FirstOfTwo, stage=stage, lr=0.1) for named in model.named_parameters()
    ]
    for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _, own=optimizer: own.step())
    with pytest.raises(RuntimeError, match=r"call it behind loss\.backward\(\)$"):
        model(torch.ones(1, 2)).sum().backward()


KEPT = {
    "views": (lambda p: p.grad.view(-1), True),
    "detached": (lambda p: p.grad.detach(), True),
    "itself": (lambda p: p.grad, False),
    "copies": (lambda p: p.grad.detach().clone(), False),
}


@pytest.mark.parametrize("how", KEPT)
def test_views_of_dropped_gradients_are_warned_of_once(how):
    keep, warns = KEPT[how]
    model = Sums(LOSSES["expanded"])
    optimizer = zero(model, world=FirstOfTwo, lr=0.1)
    kept = []
    for step in range(3):
        told = warns and step == 1
        with pytest.warns(UserWarning, match="keeps a view") if told else nullcontext():
            model().backward()
        kept.append([keep(p) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_views_of_gradients_that_accumulate_or_that_a_script_drops_are_not_warned_of(set_to_none):
    model = Sums(LOSSES["expanded"])
    optimizer = zero(model, world=FirstOfTwo, lr=0.1)
    for _ in range(3):
        for _ in range(2):
            model().backward()
            kept = [p.grad.view(-1) for p in model.parameters()]
            if set_to_none:
                del kept
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
