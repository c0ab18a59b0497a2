"""Jobs that train Hugging Face models, and the folders that are exported from them."""

from pathlib import Path

import pytest
import torch
from corpora import stories, write_records
from hf_models import write_gpt2
from job import ckpt, completed, losses, metrics, summary, train
from safetensors.torch import load_file
from tokenizers import Tokenizer

from mntrain.checkpoint.reader import list_checkpoints

ROOT = Path(__file__).parents[2]
HF = ["--task", "hf", "--train.eval-samples", "0", "--checkpoint.every", "100"]


@pytest.fixture
def text(tmp_path, monkeypatch) -> list[str]:
    """The options of the data, which has a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ["--data.path", str(write_records(tmp_path / "a", stories(200)))]


def export(folder):
    code, _, errors = ckpt("export", folder / "run", folder / "exported", "--hf")
    assert (code, errors) == (0, "")


def opened(kind, folder):
    """The exported model, of which no tensor may be missing or unexpected."""
    model, report = kind.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    assert not any(report.values()), report
    return model.eval()


def weights(folder):
    return load_file(list_checkpoints(folder / "run")[0] / "model.safetensors")


def alone(tmp_path):
    folder = tmp_path / "alone"
    folder.mkdir()
    return folder


@torch.no_grad()
@pytest.mark.exhaustive
def test_gpt2_learns_on_two_ranks_as_on_one_and_its_exported_folder_has_its_loss(tmp_path, text):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = [*HF, *text, "--hf.model", str(write_gpt2(tmp_path / "gpt2"))]
    completed(train(2, tmp_path, *options))
    completed(train(1, alone(tmp_path), *options))
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.1
    export(tmp_path)
    model = opened(AutoModelForCausalLM, tmp_path / "exported")
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.transformer.wte.weight  # tied, and stored once
    assert "lm_head.weight" not in load_file(tmp_path / "exported" / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(tmp_path / "exported" / "tokenizer.json"))
    ids = torch.tensor([i for one in stories(200) for i in [*tokenizer.encode(one).ids, 0]])
    windows = [ids[i * 32 : i * 32 + 33] for i in range((len(ids) - 1) // 32)]
    valid = torch.stack(windows[-round(0.05 * len(windows)) :])
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").encode(stories(9)[8]) == (
        tokenizer.encode(stories(9)[8]).ids
    )
    logits = model(valid[:, :-1]).logits.double().log_softmax(-1)
    loss = -logits.gather(2, valid[:, 1:, None]).mean().item()
    assert loss == pytest.approx(metrics(tmp_path)[-1]["eval_loss"], rel=1e-5)


@pytest.mark.exhaustive
def test_only_adapters_train_in_the_example(tmp_path, text):
    folder = write_gpt2(tmp_path / "gpt2", weights=True)
    options = [*HF, *text, "--hf.model", str(folder), "--zero.stage", "1"]
    options += ["--task", "lora:LoRA"]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    completed(train(2, tmp_path, *options, env=environment))
    trained, before = weights(tmp_path), load_file(folder / "model.safetensors")
    adapters = {name for name in trained if "lora_" in name}
    assert len(adapters) == 4  # two matrices for each of two layers
    assert all(trained[name].any() for name in adapters)  # those called B began with zeros
    for name in trained.keys() - adapters:
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        source = "transformer.wte.weight" if plain == "lm_head.weight" else plain
        assert torch.equal(trained[name], before[source]), name
    assert summary(tmp_path)["status"] == "completed"
