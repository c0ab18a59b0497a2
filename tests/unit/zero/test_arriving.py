"""Every way to read a parameter that is in flight gives what it is after its all-gather."""

import copy
import gc
import io
import pickle
import sys
import threading
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from first_of_two import FirstOfTwo, zero
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations

from zero.parameters import ArrivingParameter

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*TorchScript.*:DeprecationWarning"),
    # Of a compiled module, whose hooks are called twice.
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
]

X = torch.linspace(-1, 1, 10).reshape(2, 5)


class LateGathers(FirstOfTwo):
    """All-gathers that write the other rank's shard when they are waited for, and not before."""

    def all_gather(self, tensor, bounds=None):
        flat = tensor.detach().numpy()  # MPI writes bytes, whatever torch does meanwhile
        theirs = flat[bounds[1] :] * 2 + 1

        def wait():
            flat[bounds[1] :] = theirs

        return SimpleNamespace(wait=wait)


class KeepsWeights(nn.Module):
    """Reads parameters of others from a list."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, x):
        return functional.linear(x, self.weights[0])


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class AfterStep:
    """A model after a step, and what was kept of it from before the step."""

    def __init__(self, stage, overlap, prepare=None):
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(5, 6),
            nn.Tanh(),
            nn.Linear(6, 6),
            parametrizations.weight_norm(nn.Linear(6, 4)),
        )
        self.tied = nn.Linear(5, 6)
        self.tied.weight = self.model[0].weight
        self.keeper = KeepsWeights([self.model[0].weight])
        self.bare = copy.deepcopy(self.model)
        self.parameters = list(self.model.parameters())
        self.named = dict(self.model.named_parameters())
        self.prepared = prepare(self) if prepare else None
        options = {"overlap_forward": overlap, "bucket_bytes": 160, "lr": 0.1}
        self.optimizer = zero(
            self.model, world=LateGathers, stage=stage, model=self.model, **options
        )
        self.model(X).sum().backward()
        self.optimizer.step()

    @property
    def in_flight(self):
        return sum(type(p) is ArrivingParameter for p in self.parameters)


def in_thread(read):
    found = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join()
    return found[0]


def hooked(s):
    handle = s.tied.register_forward_hook(lambda *_: s.parameters[0].data * 1)
    result = s.tied(X)
    handle.remove()
    return result


def saved(s):
    buffer = io.BytesIO()
    torch.save(s.parameters[0], buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def applied(s):
    seen = []
    s.model.apply(lambda module: seen.extend(module.parameters(recurse=False)))
    return nn.utils.parameters_to_vector(seen)


def averaged(s):
    ema = [torch.zeros_like(p) for p in s.parameters]
    torch._foreach_lerp_(ema, s.parameters, 0.5)
    return torch.cat([e.flatten() for e in ema])


def compiled_function(s):
    @torch.compile(backend="eager")
    def run(x):
        return functional.linear(x, s.parameters[0])

    return run


READS = {
    "forward": lambda s: s.model(X),
    "forward of a layer": lambda s: s.model[2](torch.ones(6)),
    "tied outside": lambda s: s.tied(X),
    "list in a module": lambda s: s.keeper(X),
    "hook": hooked,
    "data parallel": lambda s: nn.DataParallel(s.model)(X),
    "linear": lambda s: functional.linear(X, s.parameters[0]),
    "data": lambda s: s.parameters[0].data.clone(),
    "detach": lambda s: s.parameters[0].detach().clone(),
    "numpy": lambda s: torch.tensor(s.parameters[0].detach().numpy()),
    "data_ptr": lambda s: (s.parameters[0].data_ptr(), s.parameters[0].data.clone())[1],
    "storage": lambda s: torch.tensor(s.parameters[0].untyped_storage().tolist()),
    "index": lambda s: s.parameters[0][0, 0] * 1,
    "item": lambda s: torch.tensor(s.parameters[0][5, 4].item()),
    "text": lambda s: torch.tensor([float(len(str(s.parameters[0])))]),
    "stack": lambda s: torch.stack([s.parameters[0]]),
    "vector": lambda s: nn.utils.parameters_to_vector(s.parameters),
    "norm": lambda s: torch.stack(torch._foreach_norm(s.parameters)),
    "average": averaged,
    "in place": lambda s: torch.zeros(6, 5).add_(s.parameters[0].data),
    "group": lambda s: s.optimizer.param_groups[0]["params"][0] * 1,
    "module": lambda s: s.model[0].weight * 1,
    "state_dict": lambda s: s.model.state_dict()["0.weight"],
    "kept state_dict": lambda s: s.model.state_dict(keep_vars=True)["0.weight"],
    "get_parameter": lambda s: s.model.get_parameter("2.weight") * 1,
    "apply": applied,
    "dictionary": lambda s: s.model[0]._parameters["bias"] * 1,
    "copied module": lambda s: copy.copy(s.model[0]).weight * 1,
    "part": lambda s: s.model[:2](X),
    "deepcopy": lambda s: copy.deepcopy(s.parameters[0]),
    "copied model": lambda s: copy.deepcopy(s.model)(X),
    "pickled module": lambda s: pickle.loads(pickle.dumps(s.model[0]))(X),
    "pickle": lambda s: pickle.loads(pickle.dumps(s.parameters[0])),
    "save": saved,
    "thread": lambda s: in_thread(lambda: s.parameters[0] * 1),
    "function": lambda s: Double.apply(s.parameters[0]),
    "graph": lambda s: torch.autograd.grad(s.tied(X).square().sum(), s.parameters[:1])[0],
    "functional": lambda s: functional_call(s.model, s.named, X),
    "functional on a copy": lambda s: functional_call(s.bare, s.named, X),
    "func.grad on a copy": lambda s: torch.func.grad(
        lambda p: functional_call(s.bare, p, X).square().sum()
    )(s.named)["0.weight"],
    "vmap": lambda s: torch.func.vmap(lambda row: row * 2)(s.parameters[0]),
    "make_fx": lambda s: torch.fx.experimental.proxy_tensor.make_fx(s.tied)(X)(X),
    "scripted in flight": lambda s: torch.jit.script(s.tied)(X),
    "traced in flight": lambda s: torch.jit.trace(s.model[2], torch.ones(1, 6))(torch.ones(1, 6)),
    "compiled in flight": lambda s: torch.compile(s.model[0], backend="eager")(X),
    "compiled function in flight": lambda s: compiled_function(s)(X),
}

# Made before the optimizer was, and called in flight.
PREPARED = {
    "scripted": lambda s: torch.jit.script(s.model[:3]),
    "traced": lambda s: torch.jit.trace(s.model[:3], X),
    "symbolic trace": lambda s: torch.fx.symbolic_trace(s.model[:3]),
    "exported": lambda s: torch.export.export(s.model[:3], (X,)).module(),
    "compiled": lambda s: torch.compile(s.model[:3], backend="eager"),
    "compiled function": compiled_function,
}


def expect_equal(stage, read, prepare=None):
    expected = AfterStep(stage, overlap=False, prepare=prepare)
    now = AfterStep(stage, overlap=True, prepare=prepare)
    assert now.in_flight
    try:
        ours, theirs = read(now).detach(), read(expected).detach()
    finally:
        now.optimizer.wait_for_parameters()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not now.in_flight
    assert not nn.modules.module._global_forward_pre_hooks
    for p, q in zip(now.parameters, expected.parameters, strict=True):
        assert type(p) is nn.Parameter
        assert "arrive" not in p.__dict__
        assert torch.equal(p, q)


COMPILERS = ("compiled", "exported")  # their import takes seconds


@pytest.fixture(autouse=True)
def no_compiler(request):
    forget_compiled()
    yield
    forget_compiled()
    if "compiled" in request.node.name:
        gc.collect()  # takes long, where many modules are imported


def forget_compiled():
    if "torch._dynamo.eval_frame" in sys.modules:  # else this would import the compiler
        torch.compiler.reset()


def marked(name, *others):
    marks = [pytest.mark.thorough] if name.startswith(COMPILERS) else []
    return pytest.param(name, *others, marks=marks)


@pytest.mark.parametrize(
    ("name", "stage"), [marked(*each) for each in zip(READS, cycle((1, 2)), strict=False)]
)
def test_a_read_waits(name, stage):
    expect_equal(stage, READS[name])


@pytest.mark.parametrize("name", [*map(marked, PREPARED)])
def test_what_was_made_before_the_optimizer_waits(name):
    if "compiled" in name:
        compiled = AfterStep(1, overlap=True, prepare=PREPARED[name])
        assert not compiled.in_flight  # a step waits once torch.compile is used
        expected = AfterStep(1, overlap=False, prepare=PREPARED[name])
        torch.testing.assert_close(compiled.prepared(X), expected.prepared(X), rtol=0, atol=0)
    else:
        expect_equal(1, lambda s: s.prepared(X), PREPARED[name])


KEPT = {
    "data": lambda s: s.parameters[0].data,
    "view": lambda s: s.parameters[0].detach()[1:, 0],
    "numpy": lambda s: s.parameters[0].detach().numpy(),
    "state_dict": lambda s: s.model.state_dict()["2.weight"],
    "storage": lambda s: s.parameters[0].untyped_storage(),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_step_waits_while_other_tensors_over_the_memory_are_kept(name):
    s = AfterStep(1, overlap=True)
    s.optimizer.wait_for_parameters()
    kept = KEPT[name](s)
    for _ in range(2):
        s.model(X).sum().backward()
        s.optimizer.step()
        assert not s.in_flight
        assert kept.tolist() == KEPT[name](s).tolist()
    del kept
    s.model(X).sum().backward()
    s.optimizer.step()
    assert s.in_flight
    s.optimizer.wait_for_parameters()


class Derived(nn.Parameter):
    pass


DERIVED = {
    "linear": lambda s: functional.linear(X, s.parameters[0]),
    "detach": lambda s: s.parameters[0].detach().clone(),
    "list in a module": lambda s: s.keeper(X),
    "vector": lambda s: nn.utils.parameters_to_vector(s.parameters[:2]),
    "group": lambda s: s.optimizer.param_groups[0]["params"][0] * 1,
}


@pytest.mark.parametrize(("name", "stage"), [*zip(DERIVED, cycle((1, 2)), strict=False)])
def test_a_parameter_of_a_derived_class_has_arrived_after_the_step(name, stage):
    def derive(s):
        for parameter in s.parameters[:2]:
            parameter.__class__ = Derived

    now, expected = (AfterStep(stage, overlap=way, prepare=derive) for way in (True, False))
    assert 0 < now.in_flight < len(now.parameters) - 1  # the others go on
    torch.testing.assert_close(DERIVED[name](now), DERIVED[name](expected), rtol=0, atol=0)
    now.optimizer.wait_for_parameters()
    assert type(now.parameters[0]) is Derived


def test_what_is_kept_while_a_group_is_added_is_known():
    s = AfterStep(1, overlap=True)
    s.optimizer.wait_for_parameters()
    kept, added = s.parameters[0].detach(), nn.Parameter(torch.ones(3))
    s.optimizer.add_param_group({"params": [("added", added)]})
    (s.model(X).sum() + added.sum()).backward()
    s.optimizer.step()
    assert not s.in_flight
    assert torch.equal(kept, s.parameters[0])


def test_what_reads_no_values_does_not_wait():
    s = AfterStep(1, overlap=True)
    count = s.in_flight
    for p in s.parameters:
        assert p.shape
        assert p.device.type == "cpu"
        assert p.dtype == torch.float32
        assert p.requires_grad
        assert p.is_leaf
        assert p.grad is not None
        p.grad = None
    s.optimizer.zero_grad()
    assert s.in_flight == count
    s.model[0](X)
    assert 0 < s.in_flight < count  # the others go on
    s.optimizer.wait_for_parameters()


def test_the_last_to_arrive_removes_the_hook_of_all_modules():
    s = AfterStep(1, overlap=True)
    assert len(nn.modules.module._global_forward_pre_hooks) == 1
    s.model(X)
    assert not nn.modules.module._global_forward_pre_hooks
    assert not s.in_flight
