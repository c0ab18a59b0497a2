import json

import pytest
import torch
from manifests import manifest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from mntrain.checkpoint.exports import export_folder

HF = manifest(task="hf")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def saved(request, tmp_path):
    """A checkpoint of a model with tied weights, and the model."""
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=11)
    model = GPT2LMHeadModel(config).to(request.param)
    path = tmp_path / "run" / "checkpoints" / "step-00000002"
    path.mkdir(parents=True)
    save_file({n: t.clone() for n, t in model.state_dict().items()}, path / "model.safetensors")
    (tmp_path / "run" / "hf").mkdir()
    # The configuration of the model that training began with names another dtype.
    content = config.to_dict() | {"architectures": ["GPT2LMHeadModel"], "dtype": "float16"}
    (tmp_path / "run" / "hf" / "config.json").write_text(json.dumps(content))
    (tmp_path / "run" / "hf" / "tokenizer.json").write_text("{}")
    return path, model


def test_an_exported_folder_has_the_tensors_and_the_dtype_of_the_checkpoint(saved, tmp_path):
    path, model = saved
    size = export_folder(path, HF, tmp_path / "out", force=False)
    assert size == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.dtype == model.dtype
    state = model.state_dict()
    assert opened.state_dict().keys() == state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in opened.state_dict().items())
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_an_existing_folder_is_kept_unless_forced(saved, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ValueError, match="out exists: give another name, or --force"):
        export_folder(saved[0], HF, tmp_path / "out", force=False)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    export_folder(saved[0], HF, tmp_path / "out", force=True)
    assert {"mine", "model.safetensors"} <= {file.name for file in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="mine exists"):
        export_folder(saved[0], HF, tmp_path / "out" / "mine", force=True)


def test_a_model_of_other_shapes_leaves_no_folder(saved, tmp_path):
    file = tmp_path / "run" / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 12}))
    with pytest.raises(ValueError, match=r"is of another model: transformer.wte"):
        export_folder(saved[0], HF, tmp_path / "out", force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_of_another_task_is_refused(saved, tmp_path):
    (tmp_path / "run" / "hf" / "config.json").unlink()
    refused = r"is of no run of --task hf, .* or of --task lm: export it to a .safetensors or .pt"
    for content in (manifest(task="own:Task"), manifest()):
        with pytest.raises(ValueError, match=refused):
            export_folder(saved[0], content, tmp_path / "out", force=False)
