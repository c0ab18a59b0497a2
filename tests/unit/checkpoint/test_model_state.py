"""A model's state, saved in one process and loaded into another model of the same class."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    HistogramObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)

from mntrain.checkpoint.format import open_tensors
from mntrain.checkpoint.model_state import MadeModel, check_restorable, copies_in, parameters_in
from mntrain.checkpoint.reader import load_model


class Extra(nn.Linear):
    """Has a state beside its tensors, which grows."""

    def __init__(self):
        super().__init__(3, 2)
        self.seen = []

    def get_extra_state(self):
        return torch.tensor(self.seen, dtype=torch.int64)

    def set_extra_state(self, state):
        self.seen = state.tolist()

    def change(self):
        self.seen.append(5)

    def state(self):
        return self.seen


class Cached(Extra):
    """Returns the same tensor as its extra state each time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, dtype=torch.int64))

    def get_extra_state(self):
        return self.cache.fill_(sum(self.seen))

    def set_extra_state(self, state):
        self.seen = [state.item()] if state else []


class Copied(nn.Linear):
    """Puts a copy of a plain attribute into its state, and takes it from there."""

    def __init__(self):
        super().__init__(3, 2)
        self.calls = torch.zeros(1)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "calls"] = self.calls.clone()

    def _load_from_state_dict(self, state, prefix, *rest):
        self.calls = state.pop(prefix + "calls")
        super()._load_from_state_dict(state, prefix, *rest)

    def change(self):
        self.calls = self.calls + 1

    def state(self):
        return self.calls.tolist()


class Hooked(Copied):
    """Does the same by hooks."""

    _save_to_state_dict = nn.Linear._save_to_state_dict
    _load_from_state_dict = nn.Linear._load_from_state_dict

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(Hooked.put)
        self.register_load_state_dict_pre_hook(Hooked.take)

    def put(self, state, prefix, metadata):
        state[prefix + "calls"] = self.calls.clone()

    def take(self, state, prefix, *_):
        self.calls = state.pop(prefix + "calls")


class ComputedFromWeight(nn.Linear):
    """Computes something from its weight when that was loaded."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_load_state_dict_post_hook(lambda module, keys: module.derive())
        self.derive()

    def derive(self):
        self.largest = float(self.weight.detach().max())

    def change(self):
        self.weight.data += 1
        self.derive()

    def state(self):
        return self.largest


class Renamed(nn.Linear):
    """Saves its own memory under another name, which its `load_state_dict` does not know."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_state_dict_post_hook(Renamed.rename)

    def rename(self, state, prefix, metadata):
        state[prefix + "kernel"] = state.pop(prefix + "weight").t()

    def change(self):
        self.weight.data += 1

    def state(self):
        return self.weight.tolist()


class Expanded(nn.Linear):
    """Has a buffer whose rows are one."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("rows", torch.ones(1, 3).expand(4, 3))

    def change(self):
        self.rows[:1] += 1

    def state(self):
        return self.rows.tolist(), self.rows.stride()


def written(path, model):
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, path)
    return open_tensors(path)


def nested(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.ModuleDict({"in": kind()}))


@pytest.mark.parametrize(
    "kind", [Extra, Cached, Copied, Hooked, ComputedFromWeight, Renamed, Expanded]
)
def test_what_a_module_puts_into_its_state_is_restored(tmp_path, kind):
    model, other = nested(kind), nested(kind)
    for part in model.parameters():
        part.data += 0.5
    model[1]["in"].change()
    assert model[1]["in"].state() != other[1]["in"].state()
    check_restorable(model, model.parameters())
    with written(tmp_path / "file", model) as file:
        load_model(file, other)
    assert other[1]["in"].state() == model[1]["in"].state()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_copies_are_told_from_the_memory_of_parameters_and_buffers():
    for kind, names in ((Extra, {"_extra_state"}), (Copied, {"calls"}), (Renamed, set())):
        model = nested(kind)
        state = model.state_dict()
        assert copies_in(model, state) == {f"1.in.{name}" for name in names}
        weight = "kernel" if kind is Renamed else "weight"
        assert set(parameters_in(model, state)) == {
            "0.weight", "0.bias", f"1.in.{weight}", "1.in.bias"
        }  # fmt: skip


class Forgets(Extra):
    set_extra_state = nn.Module.set_extra_state


class OnlyPuts(Copied):
    _load_from_state_dict = nn.Linear._load_from_state_dict


class Breaks(Extra):
    def set_extra_state(self, state):
        raise RuntimeError("not again")


class Merges(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.weight.detach() + 1


class TextAsState(Extra):
    def get_extra_state(self):
        return "words"


REFUSED = {
    Forgets: "has 1.in._extra_state, which is no parameter or buffer, and its load_state_dict",
    OnlyPuts: "has 1.in.calls, which is no parameter or buffer, and its load_state_dict does not",
    Breaks: "load_state_dict refuses its own state: not again",
    Merges: "has no entry over the memory of 1.in.weight, which the optimizer trains",
    TextAsState: "has 1.in._extra_state, a str: a checkpoint holds tensors",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_not_be_restored_is_refused_before(kind):
    model = nested(lambda: kind(3, 2) if kind is Merges else kind())
    with pytest.raises(ValueError, match=REFUSED[kind]):
        check_restorable(model, [model[1]["in"].weight])


def test_the_file_of_another_model_changes_nothing(tmp_path):
    model = nested(Extra)
    before = [p.detach().clone() for p in model.parameters()]
    file = written(tmp_path / "file", nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    with file, pytest.raises(ValueError, match="_extra_state is absent in the checkpoint"):
        load_model(file, model)
    assert all(map(torch.equal, before, model.parameters()))


def observed(observer):
    class Observed(nn.Linear):
        """Watches its inputs by an observer of torch's."""

        def __init__(self):
            super().__init__(3, 2)
            self.observer = observer()

        def change(self):
            self.observer(torch.randn(3, 4))
            self.observer(torch.randn(3, 4))

    Observed.__name__ = getattr(observer, "__name__", "FakeQuantize")
    return Observed


class Grown(nn.Linear):
    """Has a queue that grows by a row, and one that is made when it is needed."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("queue", torch.zeros(0, 3))
        self.register_buffer("none", None)

    def _load_from_state_dict(self, state, prefix, *rest):
        for name in ("queue", "none", "late"):
            if prefix + name in state:
                self.register_buffer(name, torch.empty_like(state[prefix + name]))
        super()._load_from_state_dict(state, prefix, *rest)

    def change(self):
        self.queue = torch.cat([self.queue, torch.ones(1, 3)])
        self.none = torch.full((4,), 2.0)
        self.register_buffer("late", torch.full((), torch.nan))


class Shrunk(nn.Linear):
    """Resizes its buffer in place, in a run and when it is loaded."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("rows", torch.ones(8))
        self.register_load_state_dict_pre_hook(Shrunk.resize)

    def resize(self, state, prefix, *_):
        self.rows.resize_(state[prefix + "rows"].shape)

    def change(self):
        self.rows.resize_(2).mul_(3)


TAKEN = [
    observed(PerChannelMinMaxObserver),
    observed(MovingAveragePerChannelMinMaxObserver),
    observed(HistogramObserver),
    observed(
        FakeQuantize.with_args(
            observer=MovingAveragePerChannelMinMaxObserver, qscheme=torch.per_channel_affine
        )
    ),
    Grown,
    Shrunk,
]


@pytest.mark.parametrize("kind", TAKEN)
def test_buffers_of_other_shapes_are_restored_where_the_module_takes_them(tmp_path, kind):
    model, other = nested(kind), nested(kind)
    check_restorable(model, model.parameters())
    made = MadeModel(model)
    for _ in range(2):
        model[1]["in"].change()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        made.check(model)
        assert_same_state(model, before)
    with written(tmp_path / "file", model) as file:
        load_model(file, other)
    assert_same_state(other, before)


def assert_same_state(model, state):
    own = model.state_dict()
    assert own.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(own[name].nan_to_num(7), tensor.nan_to_num(7)), name


class ChangedBuffers(nn.Linear):
    """Has buffers of which some change, without a word to load_state_dict."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("queue", torch.ones(2, 3))
        self.register_buffer("none", None)
        self.inner = nn.BatchNorm1d(2, affine=False)


class Careless(ChangedBuffers):
    """Gives its queue the shape of what is loaded, and not the values."""

    def _load_from_state_dict(self, state, prefix, *rest):
        self.queue = torch.zeros_like(state.pop(prefix + "queue"))
        super()._load_from_state_dict(state, prefix, *rest)


CHANGES = {
    "grows": (
        lambda m: setattr(m, "queue", torch.ones(4, 3)),
        r"1.in.queue is \(4, 3\), and was \(2, 3\); its load_state_dict would not restore",
    ),
    "shrinks in place": (lambda m: m.queue.resize_(1, 3), r"1.in.queue is \(1, 3\), and was"),
    "is filled": (lambda m: setattr(m, "none", torch.ones(1)), r"none is \(1,\), and was absent"),
    "is None": (lambda m: setattr(m, "queue", None), r"queue is absent, and was \(2, 3\)"),
    "is made late": (
        lambda m: m.register_buffer("late", torch.ones(5)),
        r"1.in.late is \(5,\), and was absent.*\(it does not set 1.in.late\)",
    ),
    "another module": (
        lambda m: m.add_module("more", nn.BatchNorm1d(2, affine=False)),
        r"1.in.more.running_mean is \(2,\), and was absent.*modules were added or removed",
    ),
    "a module less": (
        lambda m: delattr(m, "inner"),
        r"inner.running_mean is absent, and was \(2,\).*modules were added or removed",
    ),
    "another layer": (
        lambda m: m.add_module("more", nn.Linear(1, 1)),
        r"1.in.more.weight is \(1, 1\), and was absent.*\(parameters have changed\)",
    ),
    "weight norm": (
        nn.utils.parametrizations.weight_norm,
        r"1.in.weight is absent, and was .*parametrizations.*\(parameters have changed\)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [ChangedBuffers, Careless])
def test_what_a_model_as_it_was_made_would_not_take_is_refused(tmp_path, change, kind):
    """At the save; a file of it is refused by such a model, which is unchanged then."""
    model, other = nested(kind), nested(kind)
    made, act = MadeModel(model), CHANGES[change]
    made.check(model)
    act[0](model[1]["in"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    said = act[1] if kind is ChangedBuffers else "the model is not as it was made"
    with pytest.raises(ValueError, match=said):
        made.check(model)
    assert_same_state(model, before)
    buffers = dict(other.named_buffers())
    with written(tmp_path / "file", model) as file:
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(
            ValueError, match=r"of another model: .*in the checkpoint, .*in the mode"
        ):
            load_model(file, other)
    assert_same_state(other, before)
    assert all(tensor is buffers[name] for name, tensor in other.named_buffers())


def test_a_state_as_the_model_was_made_is_saved_again():
    model = nested(ChangedBuffers)
    made, queue = MadeModel(model), model[1]["in"].queue
    model[1]["in"].queue = torch.ones(4, 3)
    with pytest.raises(ValueError, match="not as it was made"):
        made.check(model)
    model[1]["in"].queue = queue
    made.check(model)
