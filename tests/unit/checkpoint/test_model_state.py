"""A model's state, saved in one process and loaded into another model of the same class."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mntrain.checkpoint.format import open_tensors
from mntrain.checkpoint.model_state import check_restorable, copies_in, parameters_in
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


class Derived(nn.Linear):
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


@pytest.mark.parametrize("kind", [Extra, Cached, Copied, Hooked, Derived, Renamed, Expanded])
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


class Words(Extra):
    def get_extra_state(self):
        return "words"


REFUSED = {
    Forgets: "has 1.in._extra_state, which is no parameter or buffer, and its load_state_dict",
    OnlyPuts: "has 1.in.calls, which is no parameter or buffer, and its load_state_dict does not",
    Breaks: "load_state_dict refuses its own state: not again",
    Merges: "has no entry over the memory of 1.in.weight, which the optimizer trains",
    Words: "has 1.in._extra_state, a str: a checkpoint holds tensors",
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
