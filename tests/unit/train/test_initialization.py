import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mntrain.train.initialization import freeze, load_weights


class TiedNet(nn.Module):
    """A model with a tied weight, a buffer, and 16-bit parameters."""

    def __init__(self, width=3):
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.body = nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Linear(4, width))
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight


def net(seed, **options):
    torch.manual_seed(seed)
    return TiedNet(**options)


def without_ties(model):
    """The state as safetensors files of Hugging Face have it: a tied weight once."""
    return {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}


def written(source, folder, form):
    if form == "pt":
        torch.save(source.state_dict(), folder / "weights.pt")
        return folder / "weights.pt"
    state = without_ties(source)
    if form == "file":
        save_file(state, folder / "any.safetensors")
        return folder / "any.safetensors"
    if form == "folder":
        save_file(state, folder / "model.safetensors")
        return folder
    parts = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for number, (name, tensor) in enumerate(state.items()):
        parts[f"model-{1 + number % 2}.safetensors"][name] = tensor
    for name, tensors in parts.items():
        save_file(tensors, folder / name)
    by_name = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": by_name}))
    return folder


@pytest.mark.parametrize("form", ["pt", "file", "folder", "parts"])
def test_all_weights_of_the_same_names_are_taken(tmp_path, form):
    source, model = net(1), net(2)
    source.body[1].running_mean.fill_(7.0)
    text, problems = load_weights(model, written(source, tmp_path, form))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name
    assert model.head.weight is model.embedding.weight
    assert problems == []
    assert text.startswith("11 of 11 tensors from ")


def test_weights_are_cast_to_the_dtypes_of_the_model(tmp_path):
    source, model = net(1), net(2).to(torch.bfloat16)
    load_weights(model, written(source, tmp_path, "file"))
    assert model.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(model.embedding.weight, source.embedding.weight.bfloat16())


def test_what_does_not_match_is_named_and_left_as_it_is(tmp_path):
    source, model = net(1, width=3), net(2, width=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = without_ties(source)
    del state["body.0.bias"]
    state["classifier.weight"] = torch.ones(2)
    save_file(state, tmp_path / "model.safetensors")
    _, (missing, shapes, unused) = load_weights(model, tmp_path)
    assert missing == "body.0.bias, head.weight: not in the file, so they keep their initial values"
    assert shapes.startswith("body.0.weight ((4, 3), the model's is (4, 2)), ")
    assert "embedding.weight ((5, 3), the model's is (5, 2))" in shapes
    assert unused == "classifier.weight: in the file, but not in the model"
    for name, tensor in model.state_dict().items():
        same = name in state and state[name].shape == tensor.shape
        assert torch.equal(tensor, state[name] if same else before[name]), name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "No such file"),
        ("empty", "has no weights: give a checkpoint or a run"),
        ("text.safetensors", "truncated, or not a safetensors file"),
        ("text.pt", "--init.from .*/text.pt: "),
        ("objects.pt", "holds more than tensors by name"),
        ("others.safetensors", "nothing matches the model. The file has a.weight; the model has "),
    ],
)
def test_a_path_without_weights_of_the_model_is_refused(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    for text in ("text.safetensors", "text.pt"):
        (tmp_path / text).write_text("no weights")
    torch.save({"model": net(1).state_dict(), "step": 3}, tmp_path / "objects.pt")
    save_file({"a.weight": torch.ones(1)}, tmp_path / "others.safetensors")
    model = net(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as refused:
        load_weights(model, tmp_path / name)
    assert str(refused.value).startswith("--init.from ")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_parameters_are_frozen_by_patterns_of_their_names():
    model = net(1)
    freeze(model, ["body.0.*", "head*"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"body.0.weight", "body.0.bias", "embedding.weight"}  # tied to the head
    unmatched = r"--init.freeze layer\*: matches no parameter .*embedding"
    with pytest.raises(ValueError, match=unmatched):
        freeze(net(1), ["body*", "layer*"])
