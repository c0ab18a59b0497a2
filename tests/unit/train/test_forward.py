"""A compiled model still sends gradients while backward runs."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from first_of_two import FirstOfTwo
from torch import nn

from mntrain.tasks.transformer import Transformer
from mntrain.train.forward import (
    check_compiler,
    compile_regions,
    recompute_regions,
    uncompiled,
)
from zero import ZeroOptimizer

pytestmark = pytest.mark.thorough  # its compiler takes long to import

LAYERS = 3


class LaunchLog(FirstOfTwo):
    """Writes down each launch of a bucket."""

    def __init__(self):
        self.log = []

    def all_reduce(self, tensor, wire=None):
        if tensor.dtype == torch.float32:  # weights of ranks are fp64
            self.log.append("launch")
        return SimpleNamespace(wait=lambda: None)


def recorded(regions_of, backend):
    """Run backward of a small transformer; return its gradients and launches in their order."""
    torch.manual_seed(0)
    model = Transformer(layers=LAYERS, width=16, heads=2, context=8, vocab=20)
    tokens = torch.randint(20, (4, 9))
    expected = model(tokens[:, :-1], tokens[:, 1:]).item()
    recording = LaunchLog()
    optimizer = ZeroOptimizer(
        model.named_parameters(),
        torch.optim.SGD,
        recording,
        lr=0.1,
        bucket_bytes=4096,
        model=model,
    )
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: recording.log.append(name)
        )
    compile_regions(regions_of(model), backend)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.close()
    return recording.log, gradients


class OwnLinear(nn.Linear):
    """Not torch's own."""

    def forward(self, x):
        return super().forward(x) + 1


def parts(model):
    return [*model.blocks, model.norm, model.head]


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # torch's own, in its compiler
@pytest.mark.timeout(600)  # to compile takes a while on a busy machine
def test_buckets_of_a_layer_leave_before_the_gradients_of_the_one_below():
    backend = "aot_eager"  # which splits graphs as inductor does; a job compiles with that
    log, gradients = recorded(parts, backend)
    names = [name for name in log if name != "launch"]
    assert len(names) == len(set(names)) == len(gradients)
    for layer in range(1, LAYERS):
        above = min(i for i, name in enumerate(log) if name.startswith(f"blocks.{layer}."))
        below = min(i for i, name in enumerate(log) if name.startswith(f"blocks.{layer - 1}."))
        assert "launch" in log[above:below]
    plain, expected = recorded(lambda model: [], backend)
    assert sorted(plain) == sorted(log)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
def test_layers_of_one_kind_are_compiled_once():
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    recorded(lambda model: list(model.blocks), counting)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch is older than 2.6")
@pytest.mark.parametrize("kind", [nn.Linear, OwnLinear])
def test_what_is_run_as_written_is_not_compiled_and_the_rest_is(kind):
    def refusing(graph, inputs):
        raise AssertionError("it was compiled")

    model = kind(2, 2)
    compile_regions([model], refusing)
    with uncompiled():
        assert model(torch.ones(1, 2)).shape == (1, 2)
    with pytest.raises(Exception, match="it was compiled"):
        model(torch.ones(1, 2))
    assert copy.deepcopy(model)(torch.ones(1, 2)).shape == (1, 2)  # a copy is as written


@pytest.mark.parametrize(
    ("device", "language", "variable"), [("cpu", "C++", "CXX"), ("cuda", "C", "CC")]
)
def test_a_missing_compiler_is_named(monkeypatch, device, language, variable):
    monkeypatch.setenv(variable, "no-such-compiler")
    words = (
        f"needs a {language} compiler, and there is no no-such-compiler: install one, name it in "
    )
    with pytest.raises(ValueError, match=re.escape(words + variable)):
        check_compiler(torch.device(device))


def saved_bytes(loss_of):
    """The gradients of a loss, and the bytes that forward keeps for backward."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of()
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("backend", [None, "eager"])
def test_recomputed_regions_give_the_same_gradients_and_keep_less(backend):
    torch.manual_seed(0)
    model = Transformer(layers=LAYERS, width=16, heads=2, context=8, vocab=20)
    model.blocks[1].mlp.down = nn.Sequential(model.blocks[1].mlp.down, nn.Dropout(0.5))
    other, tokens = copy.deepcopy(model), torch.randint(20, (4, 9))
    recompute_regions([*other.blocks, other.norm, other.head])
    if backend:
        compile_regions(other.blocks, backend)
    kept = []
    for each in (model, other):
        torch.manual_seed(3)
        kept.append(saved_bytes(lambda each=each: each(tokens[:, :-1], tokens[:, 1:])))
    for mine, expected in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
    assert kept[1] < kept[0] / 2
