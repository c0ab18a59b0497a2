"""The state of ZeroOptimizer in a world of one: saved, loaded, and refused."""

import copy
import io
from collections import OrderedDict, defaultdict, deque
from functools import partial
from itertools import cycle, pairwise, product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from first_of_two import STAGES, FirstOfTwo, assert_same_weights
from first_of_two import zero as zero_of
from handmade import Keeping, Lion, Listed
from optimizers import BY_PARAMETER, ELEMENTWISE, marks_of
from torch import nn

from zero import ZeroOptimizer
from zero.layout import split

ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
KEEPING = {"Listed": Listed, "Keeping": Keeping}
WHOLE = {name: BY_PARAMETER[name] for name in ("Adafactor", "Lamb")}
OPTIMIZERS = ELEMENTWISE | WHOLE | KEEPING


class Zoo(nn.Module):
    """A channels-last convolution, a pointwise one, a scalar, a turned matrix, and nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.point = nn.Conv2d(4, 3, 1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(5, 12).T)
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        hidden = torch.tanh(self.point(torch.tanh(self.conv(self.scale * x))))
        return hidden.flatten(1) @ self.turned


def net(dtype=torch.float32):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def images(steps):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 2, 3, 3, generator=generator) for _ in range(steps)]


def rows(steps):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(6, 4, generator=generator) for _ in range(steps)]


def zero(model, optimizer_class=ADAMW, **options):
    return zero_of(model, optimizer_class, **{"bucket_bytes": 100, **options})


def train(model, optimizer, data, scale=1.0):
    results = []
    for x in data:
        loss = model(x.to(next(model.parameters()).dtype)).square().mean() * scale
        (optimizer.scale(loss) if isinstance(optimizer, ZeroOptimizer) else loss).backward()
        results.append(optimizer.step())
        optimizer.zero_grad()
    return results


def trained(model=None, data=None, optimizer_class=ADAMW, **options):
    model = model or net()
    optimizer = zero(model, optimizer_class, **options)
    train(model, optimizer, data or rows(1))
    return model, optimizer


def saved(optimizer):
    """A state that has been a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def loaded(model, state, optimizer_class=ADAMW, **options):
    optimizer = zero(model, optimizer_class, **options)
    optimizer.load_state_dict(state)
    return optimizer


def load(optimizer, pieces):
    slices = (piece._asdict() for piece in pieces)
    optimizer.load_state_dict({**optimizer.state_dict(), "slices": slices})


def assert_same(mine, theirs):
    """The same containers of the same tensors, to the bit."""
    if isinstance(mine, torch.Tensor):
        assert isinstance(theirs, torch.Tensor)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine, theirs)
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert_same(value, theirs[key])
    elif isinstance(mine, list | tuple):
        assert type(mine) is type(theirs)
        for first, second in zip(mine, theirs, strict=True):
            assert_same(first, second)
    else:
        assert mine == theirs


# Round trips.


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=marks_of(name))
        for name, stage in zip(OPTIMIZERS, cycle(range(3)), strict=False)
    ],
)
def test_a_resumed_run_has_the_bits_of_plain_torch(name, stage):
    options = {"stage": stage, "partition": "auto" if name in WHOLE else "element"}
    data, kind, theirs = images(6), OPTIMIZERS[name], Zoo()
    first, optimizer = trained(copy.deepcopy(theirs), data[:3], kind, **options)
    second, state = copy.deepcopy(first), saved(optimizer)
    resumed = loaded(second, state, kind, **options)
    for key in ("slices", "param_groups", "unnamed_state"):
        assert_same(resumed.state_dict()[key], state[key])
    train(second, resumed, data[3:])
    train(theirs, kind(theirs.parameters()), data)
    assert_same_weights(second, theirs)


def test_masters_that_are_not_saved_are_those_of_the_weights_and_others_are_passed_over():
    state = saved(trained(net(torch.bfloat16), rows(2))[1])
    wide = net()
    other = loaded(wide, state)
    assert "master" not in other.state[wide[0].weight]
    train(wide, other, rows(1))
    for piece in state["slices"]:
        del piece["tensors"]["master"]
    narrow = net(torch.bfloat16)
    for piece in loaded(narrow, state).slices():
        weights = narrow.get_parameter(piece.name)
        assert torch.equal(piece.tensors["master"], weights.detach().float().flatten())


def test_a_dynamic_loss_scale_goes_on_where_it_was_and_a_fixed_one_stays():
    one = torch.tensor(1.0)
    first = net()
    optimizer = zero(first, loss_scale="dynamic")
    results = train(first, optimizer, rows(4), scale=1e35)
    assert any(result.skipped for result in results)
    second = copy.deepcopy(first)
    resumed = loaded(second, saved(optimizer), loss_scale="dynamic")
    fixed = loaded(net(), saved(optimizer), loss_scale=8.0)
    assert train(second, resumed, rows(3)) == train(first, optimizer, rows(3))
    assert resumed.state_dict()["loss_scale"] == optimizer.state_dict()["loss_scale"]
    assert float(resumed.scale(one)) < 2.0**16
    assert float(fixed.scale(one)) == 8.0
    without = trained()[1].state_dict()
    assert float(loaded(net(), without, loss_scale="dynamic").scale(one)) == 2.0**16


def test_options_that_a_user_changed_are_kept_by_group():
    def groups(model):
        named = list(model.named_parameters())
        return [{"params": named[:2], "lr": 0.3}, {"params": named[2:]}]

    optimizer, resumed = zero(groups(net())), zero(groups(net()))
    optimizer.param_groups[1]["lr"] = 0.7
    resumed.load_state_dict(saved(optimizer))
    assert [group["lr"] for group in resumed.param_groups] == [0.3, 0.7]


def test_a_loaded_state_shares_nothing_with_where_it_came_from():
    tensor_lr = partial(torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False)
    model, optimizer = trained(optimizer_class=tensor_lr)
    resumed = loaded(net(), optimizer.state_dict(), tensor_lr)
    before = copy.deepcopy(resumed.state_dict())
    train(model, optimizer, rows(2))
    optimizer.param_groups[0]["lr"].fill_(9.0)
    assert_same(resumed.state_dict(), before)


def test_a_state_in_another_float_is_cast_as_torch_casts_it():
    wide, optimizer = trained(Zoo().double(), images(2))
    narrow = Zoo()
    other = loaded(narrow, saved(optimizer))
    source, theirs = ADAMW(wide.parameters()), copy.deepcopy(narrow)
    source.state.update(optimizer.state)
    plain = ADAMW(theirs.parameters())
    plain.load_state_dict(source.state_dict())
    train(narrow, other, images(2))
    train(theirs, plain, images(2))
    assert_same_weights(narrow, theirs)


# Slices.


def test_slices_say_what_they_are_of_and_are_the_optimizers_own_memory():
    model = Zoo()
    optimizer = zero(model, stage=1)
    assert all(piece.tensors == {} and piece.others == {} for piece in optimizer.slices())
    train(model, optimizer, images(1))
    pieces = {piece.name: piece for piece in optimizer.slices()}
    assert pieces.keys() == dict(model.named_parameters()).keys() - {"nothing"}
    for name, piece in pieces.items():
        parameter = model.get_parameter(name)
        assert (piece.shape, piece.low, piece.high) == (parameter.shape, 0, parameter.numel())
        assert piece.whole
        assert all(tensor.shape == (parameter.numel(),) for tensor in piece.tensors.values())
    assert pieces["scale"].others.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert pieces["conv.weight"].tensors.keys() == {"exp_avg", "exp_avg_sq"}
    in_memory = optimizer.state[model.conv.weight]["exp_avg"].permute(0, 2, 3, 1).flatten()
    assert torch.equal(pieces["conv.weight"].tensors["exp_avg"], in_memory)
    model, optimizer = trained()
    for piece in optimizer.slices():
        piece.tensors["exp_avg"].fill_(7.0)
    assert all(bool((optimizer.state[p]["exp_avg"] == 7.0).all()) for p in model.parameters())


def cut(piece, parts):
    """A slice as several."""
    for start, stop in pairwise(split(piece.high - piece.low, parts)):
        if start < stop:
            tensors = {key: tensor[start:stop] for key, tensor in piece.tensors.items()}
            place = {"low": piece.low + start, "high": piece.low + stop}
            yield piece._replace(**place, tensors=tensors)


@pytest.mark.parametrize("parts", [2, 3, 7])
@STAGES
def test_slices_load_however_they_are_cut_and_in_any_order(stage, parts):
    _, optimizer = trained(Zoo(), images(2), stage=stage)
    resumed = zero(Zoo(), stage=stage)
    pieces = [part for piece in optimizer.slices() for part in cut(piece, parts)]
    load(resumed, reversed(pieces))
    assert_same(list(resumed.slices()), list(optimizer.slices()))


# Refusals.


def refuse(optimizer, load, *given):
    """Load what must be refused, with nothing changed; give the words."""
    before = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(ValueError, match="state") as error:
        load(*given)
    assert_same(optimizer.state_dict(), before)
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(map(torch.equal, weights, after))
    return str(error.value)


@STAGES
def test_a_state_of_another_model_is_refused_naming_each_mismatch(stage):
    _, optimizer = trained(stage=stage)
    pieces = {piece.name: piece for piece in optimizer.slices()}
    del pieces["0.bias"]
    pieces["2.bias"] = pieces["2.bias"]._replace(shape=(4,))
    pieces["9.weight"] = pieces["2.weight"]._replace(name="9.weight")
    words = refuse(optimizer, partial(load, optimizer), list(pieces.values()))
    assert words.startswith("the state does not fit this optimizer: ")
    assert "9.weight is no parameter of this model" in words
    assert "2.bias has shape (4,) in the state, (3,) here" in words
    assert "0.bias needs the elements 0 to 8" in words
    assert "0.weight" not in words


def renamed(groups, old, new):
    for group in groups:
        group["params"] = [new if name == old else name for name in group["params"]]


def split_in_two(groups):
    groups.append({**groups[0], "params": groups[0]["params"][2:]})
    groups[0]["params"] = groups[0]["params"][:2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda groups: renamed(groups, "0.bias", "bias"), "group 0 differs in 0.bias, bias"),
        (lambda groups: groups[0]["params"].pop(), "group 0 differs in 2.bias"),
        (lambda groups: groups[0]["params"].append("x"), "group 0 differs in x"),
        (lambda groups: groups[0]["params"].reverse(), "group 0 differs in the order"),
        (split_in_two, "has 2 parameter groups, not 1"),
        (lambda groups: groups.clear(), "has 0 parameter groups, not 1"),
    ],
    ids=["renamed", "fewer", "more", "reversed", "more groups", "no groups"],
)
def test_a_state_of_other_groups_is_refused_saying_how_they_differ(change, words):
    _, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    change(state["param_groups"])
    assert words in refuse(optimizer, optimizer.load_state_dict, state)


def test_a_state_that_lacks_a_part_and_one_of_other_groups_of_torch_are_refused():
    model, optimizer = trained()
    for key in ("slices", "param_groups", "loss_scale"):
        state = copy.deepcopy(optimizer.state_dict())
        del state[key]
        assert key in refuse(optimizer, optimizer.load_state_dict, state)
    plain = ADAMW(list(model.parameters())[1:])
    words = refuse(optimizer, optimizer.load_state_dict, plain.state_dict())
    assert "groups of [3] parameters, and this optimizer of [4]" in words


@STAGES
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kernel", [1, 2])  # a pointwise one has its elements in one order
def test_a_state_in_another_memory_format_is_loaded(stage, turned, kernel):
    torch.manual_seed(5)
    conv = nn.Conv2d(2, 3, kernel)
    other = copy.deepcopy(conv).to(memory_format=torch.channels_last)
    if turned:
        conv, other = other, conv
    _, optimizer = trained(conv, images(1), stage=stage)
    _, resumed = trained(other, images(2), stage=stage)
    halves = [half for piece in optimizer.slices() for half in cut(piece, 2)]
    load(resumed, halves)
    for key in ("exp_avg", "exp_avg_sq"):
        expected = optimizer.state[conv.weight][key]
        assert torch.equal(resumed.state[other.weight][key], expected)
    lacking = [half for half in halves if half.name == "bias" or half.low]
    words = refuse(resumed, partial(load, resumed), lacking)
    assert f"weight needs the elements 0 to {6 * kernel**2}" in words
    assert "bias" not in words
    if kernel > 1:
        mixed = [half._replace(order=(0, 2, 3, 1)) if i else half for i, half in enumerate(halves)]
        mixed[0] = mixed[0]._replace(order=(0, 1, 2, 3))
        assert "are in the orders" in refuse(resumed, partial(load, resumed), mixed)


def change_of(name, change):
    """Slices of which those of one parameter, cut into halves, are changed."""

    def changed(pieces):
        pieces = list(pieces)
        [found] = [piece for piece in pieces if piece.name == name]
        return [
            *(piece for piece in pieces if piece.name != name),
            *change(*cut(found, 2)),
        ]

    return changed


def without(piece, key):
    return piece._replace(tensors={k: t for k, t in piece.tensors.items() if k != key})


def shortened(piece, length):
    return piece._replace(tensors={k: t[:length] for k, t in piece.tensors.items()})


BAD_SLICES = {
    "one half": lambda low, high: [low],
    "the other half": lambda low, high: [high],
    "an overlap": lambda low, high: [low, high, high],
    "an overlap and a gap": lambda low, high: [low, low],
    "tensors of one element": lambda low, high: [low, shortened(high, 1)],
    "tensors too short": lambda low, high: [low, shortened(high, 3)],
    "a tensor missing in one": lambda low, high: [low, without(high, "exp_avg_sq")],
    "a master missing in one": lambda low, high: [low, without(high, "master")],
    "another step in one": lambda low, high: [
        low,
        high._replace(others={"step": torch.tensor(5.0)}),
    ],
}


@STAGES
@pytest.mark.parametrize("change", BAD_SLICES.values(), ids=BAD_SLICES)
def test_slices_that_make_no_whole_are_refused(change, stage):
    _, optimizer = trained(net(torch.bfloat16), stage=stage)
    pieces = change_of("0.weight", change)(optimizer.slices())
    words = refuse(optimizer, partial(load, optimizer), copy.deepcopy(pieces))
    assert "0.weight" in words
    assert "2.weight" not in words


def test_slices_that_break_off_and_pieces_of_what_is_of_rows_change_nothing():
    _, optimizer = trained(optimizer_class=OPTIMIZERS["Adafactor"])
    pieces = change_of("0.weight", lambda low, high: [low, high])(optimizer.slices())
    words = refuse(optimizer, partial(load, optimizer), pieces)
    assert "0.weight is cut" in words
    assert "of the whole parameter" in words

    def broken():
        yield from list(optimizer.slices())[:2]
        raise OSError("the file ends")

    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OSError, match="the file ends"):
        load(optimizer, broken())
    assert_same(optimizer.state_dict(), before)


def test_state_under_other_keys_goes_to_the_device_of_what_it_replaces():
    _, optimizer = trained()
    state = optimizer.state_dict() | {"unnamed_state": {"own": {"square": torch.ones(2)}}}
    optimizer.state["own"] = {"square": torch.zeros(2, device="meta")}
    optimizer.load_state_dict(state)
    assert optimizer.state["own"]["square"].device.type == "meta"
    on_meta = net().to("meta")
    assert loaded(on_meta, state).state["own"]["square"].device.type == "meta"


# State of other forms.


class Kept(Lion):
    """Keeps what `kept` returns for a parameter, from some step on."""

    def __init__(self, params, kept, start=0):
        super().__init__(params)
        self.kept, self.start, self.steps = kept, start, 0

    def step(self, closure=None):
        super().step()
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"] if self.steps > self.start else ():
                self.state[p]["kept"] = self.kept(p)


class Thing:
    pass


class NumberAndWords(NamedTuple):
    first: int
    words: str


VALUES = {
    "words": lambda p: "text",
    "nothing": lambda p: None,
    "complex": lambda p: 1 + 2j,
    "named tuple": lambda p: NumberAndWords(1, "a"),
    "set": lambda p: {1, "b"},
    "array": lambda p: np.arange(3),
    "last": lambda p: deque([torch.full_like(p, 2.0), "c"], maxlen=2),
    "by name": lambda p: OrderedDict(a=[torch.ones_like(p), {"b": (torch.tensor(3.0), 4)}]),
    "counts": lambda p: defaultdict(int, a=1),
    "integers": lambda p: torch.arange(p.numel()).view_as(p),
}


@STAGES
@pytest.mark.parametrize("name", VALUES)
def test_whatever_torch_keeps_is_kept(name, stage):
    kind = partial(Kept, kept=VALUES[name])
    model, optimizer = trained(optimizer_class=kind, stage=stage)
    for state in (copy.deepcopy(optimizer.state_dict()), optimizer.full_state_dict()):
        again = loaded(net(), state, kind, stage=(stage + 1) % 3)
        for p, other in zip(model.parameters(), again.param_groups[0]["params"], strict=True):
            expected, found = VALUES[name](p), again.state[other]["kept"]
            assert type(found) is type(expected)
            assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
            if name == "integers":  # torch casts them
                expected = expected.float()
            assert repr(found) == repr(expected)


UNLIKE = {
    "a thing": lambda p: Thing(),
    "two momenta": lambda p: torch.stack([p, p]),
    "one element": lambda p: torch.zeros(1, 1),
    "a set": lambda p: {1},
    "deep": lambda p: [{"a": Thing()}],
}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("start", [0, 8])
@pytest.mark.parametrize("name", UNLIKE)
def test_what_has_no_part_for_each_element_is_refused_when_it_is_seen(name, start, stage):
    kind = partial(Kept, kept=UNLIKE[name], start=start)
    options = {"world": FirstOfTwo, "stage": stage, "partition": "element"}
    said = "its state kept.* is a .* which has no part for each element"
    if not start:
        with pytest.raises(ValueError, match=f"^Kept cannot be sharded by element: {said}"):
            zero(net(), kind, **options)
        return
    model = net()
    optimizer = zero(model, kind, **options)
    train(model, optimizer, rows(start))
    with pytest.raises(RuntimeError, match=said):
        train(model, optimizer, rows(1))
    trained(data=rows(start + 1), optimizer_class=kind, world=FirstOfTwo, stage=stage)


class OneTensor(torch.optim.SGD):
    """Keeps a tensor for a parameter, in no dictionary; with `early`, from the start."""

    def __init__(self, params, early=False):
        super().__init__(params)
        if early:
            self.step()

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = torch.zeros_like(p)


class Wrapping(torch.optim.SGD):
    """Has the state of another optimizer in its state_dict, beside or in place of its own."""

    def __init__(self, params, entry=""):
        super().__init__(params)
        self.entry, self.inner = entry, torch.optim.Adam(self.param_groups[0]["params"])

    def step(self, closure=None):
        self.inner.step()

    def state_dict(self):
        state = self.inner.state_dict()
        return {**state, self.entry: 1} if self.entry else state


class InGroups(torch.optim.SGD):
    """Counts its steps in an attribute, which its state_dict has among the options of a group."""

    count = 0

    def state_dict(self):
        state = super().state_dict()
        state["param_groups"][0]["count"] = self.count
        return state


class InStates(torch.optim.Adam):
    """Adds to the saved state of a parameter by a hook."""

    def __init__(self, params):
        super().__init__(params)
        self.register_state_dict_post_hook(self.more)

    @staticmethod
    def more(optimizer, state):
        state["state"] = {key: {**own, "more": 1} for key, own in state["state"].items()}


@pytest.mark.parametrize("kind", [InGroups, InStates])
@STAGES
def test_what_only_state_dict_has_is_refused(kind, stage):
    with pytest.raises((ValueError, RuntimeError), match=r"differs from its .*/(count|more), whi"):
        trained(optimizer_class=kind, stage=stage)


@STAGES
def test_state_that_would_be_lost_is_refused(stage):
    with pytest.raises(ValueError, match=r"state_dict\(\) differs from that of torch's"):
        zero(net(), partial(Wrapping, entry="more"), stage=stage)
    with pytest.raises((ValueError, RuntimeError), match="keeps a Tensor as the state"):
        zero(net(), partial(OneTensor, early=True), stage=stage)
    for kind, words in ((OneTensor, "keeps a Tensor as the state"), (Wrapping, "wraps")):
        with pytest.raises((ValueError, RuntimeError), match=words):
            trained(optimizer_class=kind, stage=stage)


# State by parameter.


def test_state_of_master_weights_has_the_keys_of_plain_torch():
    model, optimizer = trained(net(torch.bfloat16))
    first, *others = parameters = list(model.parameters())
    assert list(optimizer.state) == parameters
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in parameters)
    assert first in optimizer.state
    assert optimizer.state.pop(first)["step"] == 1
    assert first not in optimizer.state
    assert optimizer.state.get(first, "none") == optimizer.state.pop(first, "none") == "none"
    with pytest.raises(KeyError):
        optimizer.state.pop(first)
    assert optimizer.state[first] == {}
    del optimizer.state[first]
    given = {"a": 1}
    assert optimizer.state.setdefault(first, given) is given
    assert optimizer.state.setdefault(first, {}) is given is optimizer.state.pop(first)
    optimizer.state["mine"] = {"a": 1}
    assert len(optimizer.state) == len(others) + 1
    assert len(copy.copy(optimizer.state)) == len(copy.deepcopy(optimizer.state)) == 4
    train(model, optimizer, rows(1))
    steps = [int(optimizer.state[p]["step"]) for p in parameters]
    assert steps == [1, 2, 2, 2]
    optimizer.state = defaultdict(dict, {first: optimizer.state[first]})
    train(model, optimizer, rows(1))
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [2, 1, 1, 1]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_a_parameter_of_several_ranks_is_its_own_or_refused(stage, dtype, partition):
    options = {"partition": partition, "bucket_bytes": 1000}  # a parameter is cut, and others not
    model, optimizer = trained(net(dtype), world=FirstOfTwo, stage=stage, **options)
    owned = {piece.name for piece in optimizer.slices() if piece.whole}
    assert 0 < len(owned) < 4
    given = torch.zeros(1)
    uses = [
        lambda state, p: state[p],
        lambda state, p: state.get(p),
        lambda state, p: p in state,
        lambda state, p: state.setdefault(p, {}),
        lambda state, p: state.pop(p),
        lambda state, p: state.update({p: {"exp_avg": given}}) or state[p],
        lambda state, p: state.__delitem__(p) or True,
    ]
    for (name, parameter), use in product(model.named_parameters(), uses):
        if name in owned:
            assert use(optimizer.state, parameter)
        else:
            with pytest.raises(RuntimeError, match=f"{name} is sharded at stage {stage}, and not"):
                use(optimizer.state, parameter)
    whole = {p: {"exp_avg": given} for name, p in model.named_parameters() if name in owned}
    optimizer.state = defaultdict(dict, whole)
    assert set(optimizer.state) == whole.keys()
    with pytest.raises(RuntimeError, match="is sharded"):
        optimizer.state = defaultdict(dict, {p: {} for p in model.parameters()})
